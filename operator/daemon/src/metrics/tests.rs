//! The scraped text, read back line by line.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use wideleaf_control::view::{BackingView, Guarantee, MappingView, NumaView, PageTablesView, SavedView, Vmm};
use wideleaf_control::vm::BeforePauseView;
use wideleaf_memory::pool::NodePool;
use wideleaf_policies::PageSize;

use super::endpoint::CONNECTIONS_MAX;
use super::*;
use crate::config::{Listen, MetricsConfig};

fn vm(pid: u32) -> VmView {
    let counts = |name: &str, count| BTreeMap::from([(name.to_owned(), count)]);
    let at_most = vec![1, 1, 2, 3, 3, 3, 3, 3, 3, 3];
    let unavailable = Quantiles { count: 4, sum_s: 0.5, at_most, ..Quantiles::default() };
    VmView {
        name: "a \"strange\"\nname".into(),
        uuid: None,
        pid,
        started_at: 7,
        vmm: Vmm::Qemu,
        cgroup: None,
        care: Care::LeftAlone { reason: "it is being migrated".into() },
        policy: Some("auto".into()),
        guarantee: Guarantee::Coverage(9_500),
        ram: Vec::new(),
        backing: Some(BackingView {
            unbacked: 1 << 20,
            base_4k: 4096,
            huge_2m: 3 * 4096,
            giant_1g: 0,
            misaligned: 512,
        }),
        scan_age_s: Some(72.5),
        mapping: Some(MappingView { pages_4k: 1, pages_2m: 2, pages_1g: 3 }),
        page_tables: Some(PageTablesView { process: Some(40 << 10), second_level_of_host: Some(64 << 10) }),
        numa: Some(numa()),
        guest_pages: None,
        saved: SavedView { swapped: Some(8192), merged: Some(4096) },
        work: Some(WorkView {
            outcomes: BTreeMap::from([("collapse".to_owned(), counts("done", 12))]),
            copied: 24 << 20,
            bloat: 4096,
            budget_refusals: 3,
            unavailable,
            walk_share: Some(1_250),
            sensor_failures: counts("zero_pages", 2),
            by_kernel: counts("collapsed", 5),
            is_recovering: true,
            recoveries: BTreeMap::from([
                ("balloon".to_owned(), RecoveriesView { done: 2, cut_off: 1, last_s: Some(1.5), ..Default::default() }),
                ("stop".to_owned(), RecoveriesView { cut_off: 1, ..Default::default() }),
            ]),
            saves: Some(PastSavesView {
                snapshots: 3,
                migrations: 1,
                migrations_failed: 2,
                last_pause_ms: Some(12.5),
                last_before_pause: Some(BeforePauseView { system_ms: 184.0, ..BeforePauseView::default() }),
                last_failed: Some(BeforePauseView { system_ms: 90.0, ..BeforePauseView::default() }),
                arrival_downtime_ms: Some(40.0),
                arrival_before_pause: Some(BeforePauseView { system_ms: 250.0, ..BeforePauseView::default() }),
                ..PastSavesView::default()
            }),
            ..WorkView::default()
        }),
        notes: Vec::new(),
    }
}

fn numa() -> NumaView {
    let node = |node, vcpus, memory| NodeView {
        node,
        vcpus,
        memory,
        huge_2m: 2 << 20,
        free_2m: 7,
        page_tables: Some(1 << 20),
        second_level_tables: Some(4096),
        ..NodeView::default()
    };
    NumaView { nodes: vec![node(0, 0, 3 << 20), node(1, 2, 6 << 20)], local_share: Some(6_666), ..NumaView::default() }
}

fn scraped(pid: u32, is_guarantee_met: bool) -> ScrapedVm {
    let view = vm(pid);
    let windows = BTreeMap::from([("large".to_owned(), 3), ("holes".to_owned(), 2)]);
    ScrapedVm { counted: view.work.clone(), view, windows, is_guarantee_met, is_guarantee_pursued: !is_guarantee_met }
}

fn scrape() -> Scrape {
    let size = PageSize::Huge2M;
    let nodes = vec![NodePool { node: 0, total: 8, free: 5, surplus: 1 }];
    Scrape {
        vms: vec![scraped(10, false), scraped(11, true)], // the same name, and no UUID
        daemon: DaemonView { vms: 2, cpu_s: 1.5, is_host_short: true, ..DaemonView::default() },
        resident: Some(Bytes::new(1 << 20)),
        pools: vec![PoolStatus { size, total: 8, free: 5, reserved: 2, surplus: 1, overcommit: 0, nodes }],
        huge_page_price: 3_407_872,
        supply: SupplyReport {
            made: 7,
            found: 2,
            refused: 1,
            unseen: 5,
            moved_pages: 1_800,
            cpu: Duration::from_millis(1_500),
            stopped: BTreeMap::from([("cpu_pressure", 4)]),
        },
    }
}

fn stop(server: MetricsServer) {
    server.stop(Instant::now() + Duration::from_secs(60));
}

/// `name{labels} value` of every line that is not a comment.
fn lines(text: &str) -> Vec<(&str, &str, f64)> {
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let (series, value) = line.rsplit_once(' ').expect("a value");
            let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
            (name, labels.strip_suffix('}').expect("closed"), value.parse().expect("a number"))
        })
        .collect()
}

fn value(text: &str, name: &str, labels: &[&str]) -> f64 {
    let is_it = |line: &&(&str, &str, f64)| line.0 == name && labels.iter().all(|label| line.1.contains(label));
    let lines = lines(text);
    let found: Vec<_> = lines.iter().filter(is_it).collect();
    assert_eq!(found.len(), 1, "{name} {labels:?} in\n{text}");
    found[0].2
}

#[test]
fn every_family_is_there_with_its_help_and_no_series_twice() {
    let text = text(scrape());
    let lines = lines(&text);
    for family in FAMILIES {
        assert!(text.contains(&format!("# HELP {} {}", family.name, family.help)), "{}", family.name);
        let is_of_it = |name: &str| name == family.row_name() || name == format!("{}_bucket", family.name);
        assert!(lines.iter().any(|(name, ..)| is_of_it(name)), "{} has no row", family.name);
    }
    let series: BTreeSet<(&str, &str)> = lines.iter().map(|(name, labels, _)| (*name, *labels)).collect();
    assert_eq!(series.len(), lines.len());
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn the_classic_text_describes_each_row_by_its_own_name() {
    let (open_metrics, classic) = (text(scrape()), format::classic(&text(scrape())));
    assert_eq!(lines(&classic), lines(&open_metrics), "the rows are the same");
    for family in FAMILIES {
        let described = format!("# HELP {} {}", family.row_name(), family.help);
        assert!(classic.contains(&described), "no {described:?} in\n{classic}");
    }
    assert!(!classic.contains("# EOF"), "{classic}");
}

/// promtool is Prometheus' own program; the build does not need it.
#[test]
fn promtool_finds_nothing_in_the_classic_text() {
    let program = std::env::var_os("PROMTOOL").unwrap_or_else(|| "promtool".into());
    let mut promtool = Command::new(program);
    promtool.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let Ok(mut promtool) = promtool.spawn() else {
        println!("skipped: promtool is not installed");
        return;
    };
    let text = format::classic(&text(scrape()));
    promtool.stdin.take().expect("it is a pipe").write_all(text.as_bytes()).expect("it reads");
    let checked = promtool.wait_with_output().expect("it ends");
    let said = [checked.stdout, checked.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
    assert_eq!((checked.status.code(), said), (Some(0), ["".into(), "".into()]), "{text}");
}

#[test]
fn the_figures_are_those_of_the_views() {
    let text = text(scrape());
    let of_10 = |name: &str, more: &str| value(&text, name, &["pid=\"10\"", more]);
    assert_eq!(of_10("wideleaf_vm_backing_bytes", "size=\"2m\""), 12_288.0);
    assert_eq!(of_10("wideleaf_vm_second_level_bytes", "size=\"1g\""), 3.0 * 1024.0 * 1024.0 * 1024.0);
    assert_eq!(of_10("wideleaf_vm_page_tables_bytes", ""), 40_960.0);
    assert_eq!(of_10("wideleaf_vm_windows", "reason=\"large\""), 3.0);
    assert_eq!(of_10("wideleaf_vm_windows", "reason=\"holes\""), 2.0);
    assert_eq!(value(&text, "wideleaf_host_second_level_tables_bytes", &[]), 65_536.0);
    assert_eq!(of_10("wideleaf_vm_coverage_ratio", ""), 0.75);
    assert_eq!(of_10("wideleaf_vm_scan_age_seconds", ""), 72.5);
    assert_eq!(of_10("wideleaf_vm_actions_total", "mechanism=\"collapse\",outcome=\"done\""), 12.0);
    assert_eq!(of_10("wideleaf_vm_copied_bytes_total", ""), f64::from(24 << 20));
    assert_eq!(of_10("wideleaf_vm_walk_share_ratio", ""), 0.125);
    assert_eq!(of_10("wideleaf_vm_left_alone", "reason=\"it is being migrated\""), 1.0);
    assert_eq!(of_10("wideleaf_vm_guarantee_met", ""), 0.0);
    assert_eq!(value(&text, "wideleaf_vm_guarantee_met", &["pid=\"11\""]), 1.0);
    assert_eq!(of_10("wideleaf_vm_guarantee_pursued", ""), 1.0);
    assert_eq!(of_10("wideleaf_vm_recovery_seconds", "event=\"balloon\""), 1.5);
    assert_eq!(of_10("wideleaf_vm_recoveries_total", "event=\"balloon\",outcome=\"done\""), 2.0);
    assert_eq!(of_10("wideleaf_vm_recoveries_total", "event=\"stop\",outcome=\"cut_off\""), 1.0);
    assert_eq!(of_10("wideleaf_vm_recovering", ""), 1.0);
    let saves = |kind, outcome| of_10("wideleaf_vm_saves_total", &format!("kind=\"{kind}\",outcome=\"{outcome}\""));
    let counts = ["snapshot", "migration"].map(|kind| ["done", "failed"].map(|outcome| saves(kind, outcome)));
    assert_eq!(counts, [[3.0, 0.0], [1.0, 2.0]]);
    let seconds = ["snapshot_pause", "snapshot_system", "failed_save_system", "arrival_downtime", "arrival_system"];
    let values = seconds.map(|of| of_10(&format!("wideleaf_vm_{of}_seconds"), ""));
    assert_eq!(values, [0.0125, 0.184, 0.09, 0.04, 0.25]);
    let timed = text.lines().filter(|line| line.starts_with("wideleaf_vm_recovery_seconds{"));
    assert!(!timed.into_iter().any(|line| line.contains("stop")), "no recovery from a stop was done");
    let second = |more: &'static str| ["pid=\"10\"", "node=\"1\"", more];
    assert_eq!(value(&text, "wideleaf_vm_node_bytes", &second("size=\"4k\"")), f64::from(4 << 20));
    assert_eq!(value(&text, "wideleaf_vm_node_bytes", &second("size=\"2m\"")), f64::from(2 << 20));
    assert_eq!(value(&text, "wideleaf_vm_node_vcpus", &second("node")), 2.0);
    assert_eq!(value(&text, "wideleaf_vm_local_memory_ratio", &["pid=\"11\""]), 0.6666);
    assert_eq!(value(&text, "wideleaf_host_node_free_huge_pages", &["node=\"0\"", "size=\"2m\""]), 7.0);
    let tables = ["node=\"0\"", "kind=\"second_level\""];
    assert_eq!(value(&text, "wideleaf_host_node_page_tables_bytes", &tables), 4096.0);
    assert_eq!(value(&text, "wideleaf_pool_pages", &["size=\"2m\",node=\"0\",state=\"surplus\""]), 1.0);
    assert_eq!((value(&text, "wideleaf_daemon_vms", &[]), value(&text, "wideleaf_host_short", &[])), (2.0, 1.0));
    assert_eq!(value(&text, "wideleaf_host_huge_page_price_cycles_per_second", &[]), 3_407_872.0);
    let blocks = |result| value(&text, "wideleaf_supply_blocks_total", &[&format!("result=\"{result}\"")]);
    assert_eq!(["made", "found", "refused"].map(blocks), [7.0, 2.0, 1.0]);
    assert_eq!(value(&text, "wideleaf_supply_cpu_seconds_total", &[]), 1.5);
    assert_eq!(value(&text, "wideleaf_supply_moved_pages_total", &[]), 1_800.0);
    assert_eq!(value(&text, "wideleaf_supply_unseen_blocks_total", &[]), 5.0);
    assert_eq!(value(&text, "wideleaf_supply_stops_total", &["reason=\"cpu_pressure\""]), 4.0);
}

#[test]
fn counters_are_of_this_daemon_and_resident_memory_is_of_all() {
    let mut scrape = scrape();
    scrape.vms.truncate(1);
    scrape.vms[0].counted = Some(WorkView { copied: 7, bloat: 9, ..WorkView::default() });
    let text = text(scrape);
    let of_it = |name: &str| value(&text, name, &["pid=\"10\""]);
    assert_eq!((of_it("wideleaf_vm_swapped_bytes"), of_it("wideleaf_vm_merged_bytes")), (8192.0, 4096.0));
    assert_eq!((of_it("wideleaf_vm_copied_bytes_total"), of_it("wideleaf_vm_bloat_bytes")), (7.0, 4096.0));
    assert_eq!(of_it("wideleaf_vm_unavailable_seconds_count"), 0.0);
}

#[test]
fn buckets_add_up_to_the_count() {
    let text = text(scrape());
    let bucket =
        |le: &str| value(&text, "wideleaf_vm_unavailable_seconds_bucket", &["pid=\"10\"", &format!("le=\"{le}\"")]);
    assert_eq!(
        [bucket("0.0001"), bucket("0.0005"), bucket("0.001"), bucket("0.2"), bucket("+Inf")],
        [1.0, 2.0, 3.0, 3.0, 4.0]
    );
    assert_eq!(value(&text, "wideleaf_vm_unavailable_seconds_count", &["pid=\"10\""]), 4.0);
}

#[test]
fn best_effort_has_no_guarantee_to_meet_and_unknown_figures_have_no_row() {
    let mut scrape = scrape();
    for ScrapedVm { view, counted, .. } in &mut scrape.vms {
        view.guarantee = Guarantee::BestEffort;
        (view.mapping, view.page_tables, view.work, *counted) = (None, None, None, None);
    }
    let text = text(scrape);
    for name in [
        "wideleaf_vm_guarantee_met",
        "wideleaf_vm_guarantee_pursued",
        "wideleaf_vm_second_level_bytes",
        "wideleaf_vm_page_tables_bytes",
        "wideleaf_host_second_level_tables_bytes",
        "wideleaf_vm_copied_bytes_total",
    ] {
        assert!(!text.contains(name), "{name}");
    }
}

fn file(path: &str) -> String {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// All words that look like one of the daemon's metrics.
fn named(text: &str) -> BTreeSet<&str> {
    let is_outside = |c: char| !c.is_ascii_alphanumeric() && c != '_';
    text.split(is_outside).filter(|word| word.starts_with("wideleaf_") && word.len() > "wideleaf_vm_".len()).collect()
}

fn row_names() -> BTreeSet<String> {
    FAMILIES.iter().map(Family::row_name).collect()
}

#[test]
fn every_metric_of_the_dashboard_exists_and_every_metric_is_on_it() {
    let text = file("../../packaging/grafana.json");
    let _: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
    let shown: BTreeSet<String> = named(&text).iter().map(|name| name.trim_end_matches("_bucket").to_owned()).collect();
    assert_eq!(shown, row_names());
}

#[test]
fn the_dashboard_mixes_neither_hosts_nor_sizes_and_kinds_of_a_node() {
    let dashboard: serde_json::Value = serde_json::from_str(&file("../../packaging/grafana.json")).expect("it is JSON");
    assert_eq!(dashboard["templating"]["list"][1]["name"], "host");
    let panels = dashboard["panels"].as_array().expect("a list");
    for target in panels.iter().flat_map(|panel| panel["targets"].as_array().expect("a list")) {
        let query = target["expr"].as_str().expect("a query");
        assert!(!named(query).is_empty(), "{query}");
        for name in named(query) {
            assert!(query.contains(&format!("{name}{{instance=\"$host\"")), "{query}");
        }
        for (name, labels) in [("free_huge_pages", "(node, size)"), ("page_tables", "(node, kind)")] {
            assert!(!query.contains(&format!("wideleaf_host_node_{name}")) || query.contains(labels), "{query}");
        }
    }
}

#[test]
fn every_metric_of_the_fleet_s_dashboard_and_of_the_alerts_exists() {
    let _: serde_json::Value = serde_json::from_str(&file("../../packaging/grafana-fleet.json")).expect("it is JSON");
    for path in
        ["../../packaging/grafana-fleet.json", "../../packaging/alerts.yaml", "../../packaging/alerts-test.yaml"]
    {
        let text = file(path);
        let used: BTreeSet<String> =
            named(&text).iter().map(|name| name.trim_end_matches("_bucket").to_owned()).collect();
        assert!(used.len() >= 8, "{path} uses {used:?}");
        assert_eq!(used.difference(&row_names()).collect::<Vec<_>>(), [""; 0], "{path}");
    }
}

#[test]
fn the_readme_lists_every_metric() {
    let text = file("README.md");
    let listed: BTreeSet<String> =
        text.lines().filter(|line| line.starts_with("| `wideleaf_")).flat_map(named).map(str::to_owned).collect();
    assert_eq!(listed, row_names());
}

fn at(listen: Listen) -> MetricsConfig {
    MetricsConfig { listen, ..MetricsConfig::default() }
}

fn get(stream: impl Read + Write, request: &str) -> String {
    get_with(stream, request, "")
}

fn get_with(mut stream: impl Read + Write, request: &str, headers: &str) -> String {
    write!(stream, "{request} HTTP/1.1\r\nHost: localhost\r\n{headers}Connection: close\r\n\r\n").expect("written");
    let mut reply = String::new();
    stream.read_to_string(&mut reply).expect("a reply");
    reply
}

#[test]
fn it_is_scraped_over_http_and_nothing_else_is_there() {
    let listen = Listen::Tcp("127.0.0.1:0".parse().expect("an address"));
    let server = MetricsServer::start(&at(listen), scrape).expect("a port is free").expect("it is not off");
    let address = server.address().expect("a TCP port");
    let ask = |request: &str| get(TcpStream::connect(address).expect("it listens"), request);
    let accept = "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n";
    let reply = get_with(TcpStream::connect(address).expect("it listens"), "GET /metrics", accept);
    assert!(
        reply.starts_with("HTTP/1.1 200")
            && reply.contains("application/openmetrics-text; version=1.0.0; charset=utf-8")
            && reply.ends_with("# EOF\n"),
        "{reply}"
    );
    let reply = ask("GET /metrics");
    assert!(
        reply.starts_with("HTTP/1.1 200")
            && reply.contains("text/plain; version=0.0.4; charset=utf-8")
            && reply.contains("# TYPE wideleaf_vm_copied_bytes_total counter\n")
            && !reply.contains("# EOF"),
        "{reply}"
    );
    assert!(ask("GET /").starts_with("HTTP/1.1 404"));
    assert!(ask("POST /metrics").starts_with("HTTP/1.1 405"));
    stop(server);
}

#[test]
fn a_unix_socket_that_a_killed_daemon_left_is_replaced_and_removed_at_the_end() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("metrics.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).expect("bound"));
    let server =
        MetricsServer::start(&at(Listen::Unix(path.clone())), scrape).expect("replaced").expect("it is not off");
    assert!(get(UnixStream::connect(&path).expect("it listens"), "GET /metrics").starts_with("HTTP/1.1 200"));
    stop(server);
    assert!(!path.exists());
    assert!(MetricsServer::start(&at(Listen::Off), scrape).expect("nothing to do").is_none());
}

#[test]
fn a_unix_socket_has_the_configured_mode_and_is_not_taken_from_a_listener() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("metrics.sock");
    let mode = || path.metadata().expect("it is there").permissions().mode() & 0o777;
    let first = MetricsServer::start(&at(Listen::Unix(path.clone())), scrape).expect("free").expect("it is not off");
    assert_eq!(mode(), 0o660);
    let taken = MetricsServer::start(&at(Listen::Unix(path.clone())), scrape).err().expect("another server listens");
    let (pid, text) = (std::process::id(), taken.to_string());
    assert!(text.contains(&format!("(pid {pid}) is listening")) && text.contains("another metrics.listen"), "{text}");
    assert!(get(UnixStream::connect(&path).expect("it listens"), "GET /metrics").starts_with("HTTP/1.1 200"));
    stop(first);
    let open = MetricsConfig { mode: 0o666, ..at(Listen::Unix(path.clone())) };
    let second = MetricsServer::start(&open, scrape).expect("free again").expect("it is not off");
    assert_eq!(mode(), 0o666);
    stop(second);
    std::fs::write(&path, "a letter").expect("written");
    let other = MetricsServer::start(&at(Listen::Unix(path.clone())), scrape).err().expect("something else is there");
    assert!(other.to_string().contains("is not a socket") && path.exists(), "{other}");
}

#[test]
fn the_end_waits_for_no_scrape_beyond_its_time() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("metrics.sock");
    let (began, has_begun) = channel();
    let (let_go, is_let_go) = channel::<()>();
    let slow = move || {
        began.send(()).expect("the test waits for it");
        // The end of the channel lets it go.
        let _ = is_let_go.recv();
        scrape()
    };
    let server = MetricsServer::start(&at(Listen::Unix(path.clone())), slow).expect("free").expect("it is not off");
    let mut client = UnixStream::connect(&path).expect("it listens");
    client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").expect("written");
    has_begun.recv().expect("it is scraped");
    server.stop(Instant::now());
    assert!(!path.exists());
    drop(let_go);
}

/// More clients than there are places, each of which sends `begin` and no more.
fn crowd(path: &std::path::Path, begin: &[u8]) -> Vec<UnixStream> {
    let connect = |_| {
        let mut stream = UnixStream::connect(path).expect("it listens");
        stream.write_all(begin).expect("written");
        stream
    };
    (0..2 * CONNECTIONS_MAX).map(connect).collect()
}

#[test]
fn whatever_a_crowd_does_a_request_is_answered_and_the_end_waits_for_no_client() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("metrics.sock");
    // A page that fills a socket's buffer several times.
    let large = || Scrape { vms: (0..200).map(|pid| scraped(pid, true)).collect(), ..scrape() };
    let server =
        MetricsServer::start(&at(Listen::Unix(path.clone())), large).expect("it is free").expect("it is not off");
    let mut crowds = Vec::new();
    for begin in ["", "GET /metr", "GET /metrics HTTP/1.1\r\n\r\n"] {
        crowds.push(crowd(&path, begin.as_bytes()));
        let accept = "Accept: application/openmetrics-text\r\n";
        let reply = get_with(UnixStream::connect(&path).expect("it listens"), "GET /metrics", accept);
        assert!(reply.starts_with("HTTP/1.1 200") && reply.ends_with("# EOF\n"), "after a crowd of {begin:?}: {reply}");
    }
    stop(server);
    drop(crowds);
}
