//! `wideleaf pool` on captured trees, in which a file keeps what was written to it, and on four pages
//! of the real pool.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::program::new_scratch;
use crate::turn_at_the_pool;
use predicates::prelude::*;
use serde_json::{Value, json};
use wideleaf_testing::scratch::Scratch;

const POOL: &str = "sys/kernel/mm/hugepages/hugepages-2048kB";

/// A tree with a pool of 2 MiB pages on two nodes: 10 and 6 pages, of which 4 and 6 are free and 3 reserved.
fn tree() -> Scratch {
    let scratch = new_scratch();
    put(&scratch, POOL, &[("nr_hugepages", 16), ("free_hugepages", 10), ("surplus_hugepages", 0)]);
    put(&scratch, POOL, &[("resv_hugepages", 3), ("nr_overcommit_hugepages", 7)]);
    put(&scratch, &node(0), &[("nr_hugepages", 10), ("free_hugepages", 4), ("surplus_hugepages", 0)]);
    put(&scratch, &node(1), &[("nr_hugepages", 6), ("free_hugepages", 6), ("surplus_hugepages", 0)]);
    text(
        &scratch,
        "proc/buddyinfo",
        "Node 0, zone Normal 0 0 0 0 0 0 0 0 4 8 0\nNode 1, zone Normal 0 0 0 0 0 0 0 0 0 1 0\n",
    );
    for node in 0..2 {
        let cache = format!("Node {node} Active(file): 1024 kB\nNode {node} Inactive(file): 1024 kB\n");
        text(&scratch, &format!("sys/devices/system/node/node{node}/meminfo"), &cache);
        text(&scratch, &format!("sys/devices/system/node/node{node}/compact"), "");
    }
    text(&scratch, "proc/mounts", "none /dev/hugepages hugetlbfs rw,pagesize=2M 0 0\n");
    text(&scratch, "proc/30/status", "VmSize:\t 9 kB\nHugetlbPages:\t 10240 kB\n");
    text(&scratch, "proc/30/smaps", "1000-2000 rw-p 0 0:0 0\nKernelPageSize: 2048 kB\nPrivate_Hugetlb: 10240 kB\n");
    text(&scratch, "proc/30/comm", "qemu\u{1b}[31m\n");
    text(&scratch, "proc/31/status", "VmSize:\t 9 kB\nHugetlbPages:\t 2048 kB\n");
    scratch
}

fn node(number: u32) -> String {
    format!("sys/devices/system/node/node{number}/hugepages/hugepages-2048kB")
}

fn text(scratch: &Scratch, name: &str, text: &str) {
    let path = scratch.path(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn put(scratch: &Scratch, folder: &str, numbers: &[(&str, u64)]) {
    numbers.iter().for_each(|(name, number)| text(scratch, &format!("{folder}/{name}"), &format!("{number}\n")));
}

/// Number of pages in a pool's file.
fn total(scratch: &Scratch, folder: &str) -> String {
    fs::read_to_string(scratch.path(folder).join("nr_hugepages")).unwrap().trim().to_owned()
}

fn said(scratch: &Scratch, arguments: &[&str]) -> String {
    let output = scratch.wideleaf(&[&["pool"], arguments, &["--root=."]].concat()).assert().success().stderr("");
    String::from_utf8(output.get_output().stdout.clone()).unwrap()
}

fn json(scratch: &Scratch, arguments: &[&str]) -> Value {
    serde_json::from_str(&said(scratch, &[arguments, &["--format=json"]].concat())).unwrap()
}

#[test]
fn a_list_has_pools_nodes_holders_mounts_and_unseen_pages() {
    let list = json(&tree(), &["list"]);
    let pool = &list["pools"][0];
    assert_eq!((&pool["page"], &pool["page_bytes"], &pool["total_pages"]), (&json!("2m"), &json!(2 << 20), &json!(16)));
    assert_eq!(
        (&pool["free_pages"], &pool["reserved_pages"], &pool["overcommit_pages"]),
        (&json!(10), &json!(3), &json!(7))
    );
    assert_eq!((&pool["nodes"][1]["node"], &pool["nodes"][1]["total_pages"]), (&json!("1"), &json!(6)));
    assert_eq!((&list["holders"][0]["pid"], &list["holders"][0]["private_pages"]), (&json!(30), &json!(5)));
    assert_eq!(list["mounts"], json!([{"path": "/dev/hugepages", "page_bytes": 2 << 20}]));
    let notes = list["notes"].to_string();
    assert!(notes.contains("cannot use a hugetlb pool of 1g pages: this kernel has none"), "{notes}");
    assert!(notes.contains("1 of 6 pages of 2m in use are mapped by no visible process"), "{notes}");
    assert!(notes.contains("processes 31 may have pages") && notes.contains("run this as root"), "{notes}");
}

#[test]
fn a_list_escapes_control_characters_in_names_of_processes() {
    let list = said(&tree(), &["list", "--size=2m"]);
    assert!(list.contains("node 1") && list.contains("hugetlbfs with pages of 2 MiB at /dev/hugepages"), "{list}");
    assert!(list.contains("qemu?[31m") && !list.contains('\u{1b}'), "{list}");
}

#[test]
fn a_pool_without_a_mount_is_named_with_a_remedy() {
    let scratch = tree();
    text(&scratch, "proc/mounts", "");
    let notes = json(&scratch, &["list"])["notes"].to_string();
    assert!(notes.contains("mount -t hugetlbfs -o pagesize=2M none /dev/hugepages"), "{notes}");
}

#[test]
fn a_dry_run_describes_its_writes_and_their_cost_and_writes_nothing() {
    let scratch = tree();
    let plan = said(&scratch, &["reserve", "--size=2m", "--bytes=4194303", "--node=1", "--dry-run"]);
    assert!(plan.starts_with("2 pages of 2m would be added: 4 MiB\nwould write 1 to "), "{plan}");
    assert!(plan.contains("node1/compact\nwould write 8 to "), "{plan}");
    assert!(plan.contains("node 1 has 2 MiB free: 1 whole blocks of 2 MiB now"), "{plan}");
    assert!(plan.contains("now: 16 in the pool, 6 in use, 3 reserved; process 30 (qemu?[31m) has 5"), "{plan}");
    let plan = said(&scratch, &["release", "--size=2m", "--all-unused", "--dry-run"]);
    assert!(plan.starts_with("7 pages of 2m would be released: 14 MiB\nwould write 9 to "), "{plan}");
    assert_eq!([POOL, &node(0), &node(1)].map(|folder| total(&scratch, folder)), ["16", "10", "6"]);
    assert_eq!(fs::read_to_string(scratch.path("sys/devices/system/node/node1/compact")).unwrap(), "");
}

#[test]
fn pages_are_added_to_the_pool_and_released_on_the_given_node() {
    let scratch = tree();
    let change = json(&scratch, &["reserve", "--size=2m", "--pages=3"]);
    assert_eq!(
        (&change["change"], &change["changed_pages"], &change["pool"]["total_pages"]),
        (&json!("reserve"), &json!(3), &json!(19))
    );
    assert_eq!(total(&scratch, POOL), "19");
    let change = json(&scratch, &["release", "--size=2m", "--pages=2", "--node=0"]);
    assert_eq!((&change["changed_pages"], total(&scratch, &node(0))), (&json!(2), "8".to_owned()));
}

/// Reservation for a domain that has not started, as in the daemon's reply and its state file.
fn room(pages: u64, node: Option<u32>, has_started: bool) -> Value {
    let made_at_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let wanted = json!([{ "page_bytes": 2 << 20, "pages": pages, "node": node }]);
    json!({
        "uuid": "u", "domain": "web", "wanted": wanted, "grown": [], "has_started": has_started, "made_at_s": made_at_s
    })
}

#[test]
fn pages_reserved_for_a_starting_domain_are_not_released() {
    let scratch = tree();
    fs::create_dir_all(scratch.path("run/wideleaf")).unwrap();
    let listener = UnixListener::bind(scratch.path("run/wideleaf/control.sock")).unwrap();
    let daemon = std::thread::spawn(move || {
        for answer in [json!([room(2, None, false), room(1, Some(1), false), room(9, None, true)]), json!([])] {
            let (stream, _) = listener.accept().unwrap();
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).unwrap();
            assert!(line.contains("\"rooms\""), "{line}");
            writeln!(&stream, "{}", json!({ "ok": { "rooms": answer } })).unwrap();
        }
    });
    // Ten pages free, three reserved by the kernel, three for the domain.
    let change = json(&scratch, &["release", "--size=2m", "--all-unused"]);
    assert_eq!((&change["changed_pages"], total(&scratch, POOL)), (&json!(4), "12".to_owned()));
    // Now no page is reserved for a domain. In a captured tree, free pages do not shrink with the pool.
    put(&scratch, POOL, &[("nr_hugepages", 17)]);
    assert_eq!(json(&scratch, &["release", "--size=2m", "--all-unused"])["changed_pages"], json!(7));
    daemon.join().unwrap();
}

#[test]
fn without_a_daemon_the_state_file_gives_the_reservations_and_if_unreadable_nothing_is_released() {
    let scratch = tree();
    let state = |rooms: &Value| text(&scratch, "var/lib/wideleaf/state.json", &json!({ "rooms": rooms }).to_string());
    let mut stale = room(7, None, false);
    stale["made_at_s"] = json!(1_000_000);
    state(&json!([room(5, None, false), stale]));
    let plan = said(&scratch, &["release", "--size=2m", "--all-unused", "--dry-run"]);
    assert!(plan.starts_with("2 pages of 2m would be released"), "{plan}");
    let words = ["cannot release 3 pages of 2m: 2 are unused", "5 kept for domains that are about to start"];
    let release = ["pool", "release", "--size=2m", "--pages=3", "--root=."];
    let refuses = |arguments: &[&str], words: &[&str]| {
        let output = scratch.wideleaf(arguments).assert().code(4).stdout("");
        let stderr = String::from_utf8(output.get_output().stderr.clone()).unwrap();
        assert!(stderr.lines().count() == 1 && words.iter().all(|word| stderr.contains(word)), "{stderr}");
    };
    refuses(&release, &words);
    text(&scratch, "var/lib/wideleaf/state.json", "{");
    refuses(&release, &["cannot determine the pages that are kept", "state.json", "the pool is as it was"]);
    assert_eq!(total(&scratch, POOL), "16");
}

#[test]
fn impossible_changes_are_refused_in_one_line_with_numbers_and_a_remedy() {
    let scratch = tree();
    // The pool's lock exists from its first use.
    fs::create_dir_all(scratch.path("run/wideleaf")).unwrap();
    let refuses = |arguments: &[&str], words: &[&str]| {
        scratch.refuses(&[&["pool"], arguments, &["--root=."]].concat(), 4, words);
    };
    let words = ["cannot make 9 pages of 2m (18 MiB)", "node 1 has 2 MiB free", "2 MiB of file cache", "--at-most"];
    refuses(&["reserve", "--size=2m", "--pages=9", "--node=1"], &words);
    refuses(
        &["reserve", "--size=2m", "--pages=1", "--node=5"],
        &["pool of 2m pages on node 5: it has none", "these have: 0, 1"],
    );
    refuses(&["reserve", "--size=1g", "--pages=1"], &["cannot use a hugetlb pool of 1g pages: this kernel has none"]);
    let words = ["cannot release 8 pages of 2m: 7 are unused", "process 30", "--all-unused"];
    refuses(&["release", "--size=2m", "--pages=8"], &words);
    put(&scratch, POOL, &[("free_hugepages", 99)]);
    refuses(&["list"], &["contradict each other: 99 pages free, 16 in all"]);
    refuses(&["release", "--size=2m", "--all-unused"], &["contradict each other"]);
    text(&scratch, &format!("{POOL}/nr_hugepages"), "many\n");
    refuses(&["reserve", "--size=2m", "--pages=1"], &["nr_hugepages: expected a number, found \"many\\n\""]);
}

#[test]
fn a_partial_reservation_is_reported_as_such() {
    let said = said(&tree(), &["reserve", "--size=2m", "--pages=99", "--at-most"]);
    // 8 whole blocks and 2 after compaction on node 0, one on node 1. A captured tree grants what is requested of it.
    assert!(said.starts_with("11 of 99 pages of 2m were added: 22 MiB\n"), "{said}");
}

#[test]
fn an_invalid_amount_or_pool_is_refused_with_valid_ones() {
    for (arguments, word) in [
        (["reserve", "--size=4k", "--pages=1"], "write 2m or 1g"),
        (["reserve", "--size=2m", "--pages=0"], "1.."),
        (["reserve", "--size=2m", "--bytes=0"], "the size is zero"),
        (["reserve", "--size=2m", "--dry-run"], "--pages <N>|--bytes <SIZE>"),
        (["release", "--size=2m", "--dry-run"], "--pages <N>|--all-unused"),
        (["release", "--pages=1", "--all-unused"], "cannot be used with"),
    ] {
        let scratch = new_scratch();
        let wrong = scratch.wideleaf(&[&["pool"], &arguments[..]].concat()).assert().code(2).stdout("");
        wrong.stderr(predicates::str::contains(word));
    }
    let scratch = new_scratch();
    let help = scratch.wideleaf(&["pool", "reserve", "--help"]).assert().success();
    help.stdout(predicates::str::contains("Examples:").and(predicates::str::contains("hugepagesz=1G hugepages=N")));
}

/// Four pages of the real pool, which are returned also if a test panics.
struct Added<'a>(&'a Scratch, bool);

impl Added<'_> {
    fn change(&self, what: &str) -> Option<Value> {
        let arguments = ["pool", what, "--size=2m", "--pages=4", "--format=json"];
        let output = self.0.wideleaf(&arguments).output().unwrap();
        output.status.success().then(|| serde_json::from_slice(&output.stdout).unwrap())
    }
}

impl Drop for Added<'_> {
    fn drop(&mut self) {
        if self.1 {
            let _ = self.change("release");
        }
    }
}

#[test]
fn the_real_pool_grows_by_the_requested_pages_and_shrinks_back_after_the_release() {
    const ATTEMPTS: u32 = 20;
    let file = Path::new("/").join(POOL).join("nr_hugepages");
    if let Err(error) = fs::File::options().write(true).open(&file) {
        println!("skipped: {}: {error}", file.display());
        return;
    }
    let scratch = new_scratch();
    let pages = || fs::read_to_string(&file).unwrap();
    // Other programs may use the pool at the same time. One undisturbed attempt is enough.
    let is_as_before = || {
        let (before, mut added) = (pages(), Added(&scratch, false));
        let more = added.change("reserve").unwrap();
        added.1 = true;
        let Some(fewer) = added.change("release") else { return false };
        added.1 = false;
        let total = |change: &Value| change["pool"]["total_pages"].as_u64().unwrap();
        let are_four = more["changed_pages"] == 4 && fewer["changed_pages"] == 4;
        are_four && total(&more) == total(&fewer) + 4 && pages() == before
    };
    let _turn = turn_at_the_pool();
    assert!((0..ATTEMPTS).any(|_| is_as_before()));
}
