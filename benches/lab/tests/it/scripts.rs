//! The scripts of `benches` that keep results, in a folder of their own: none of them touches the repository.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Output;

use serde_json::{Value, json};

use crate::experiment_reports::{file, results};
use crate::program::new_scratch;
use wideleaf_experiments::definition::{Arm, Cell};
use wideleaf_experiments::results::{Actions, Results, RunOutcome};
use wideleaf_testing::scratch::Scratch;

/// Runs a copy of a script with this wideleaf-lab.
fn script(scratch: &Scratch, name: &str, arguments: &[&str], lab: &Path) -> Output {
    ["benches/results", "benches/data", "target"].iter().for_each(|f| fs::create_dir_all(scratch.path(f)).unwrap());
    let copy = scratch.path("benches").join(name);
    fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name), &copy).unwrap();
    let mut command = assert_cmd::Command::new(copy);
    command.args(arguments).current_dir(scratch.path(".")).env("WIDELEAF_LAB", lab).output().unwrap()
}

fn names_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    names
}

#[test]
fn a_page_is_kept_only_of_complete_results_of_a_revision() {
    let scratch = new_scratch();
    let complete = results("by-hand", 1.5);
    let keep = |name: &str, change: &dyn Fn(&mut Results)| {
        let mut changed = complete.clone();
        changed.environment.wideleaf = "0.9.0 (0123456789ab)".into();
        change(&mut changed);
        file(&scratch, name, &changed);
        let output = script(&scratch, "keep-result", &[name], &scratch.program());
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let refused = [
        keep("part.json", &|results| results.is_complete = false),
        keep("dirty.json", &|results| results.environment.wideleaf.insert_str(19, "-dirty")),
    ];
    let words = ["is not complete; go on with wideleaf-lab experiment run by-hand --resume", "in no revision; commit"];
    for ((code, said), words) in refused.iter().zip(words) {
        assert_eq!(*code, Some(1), "{said}");
        assert!(said.starts_with("keep-result: cannot keep a result: ") && said.contains(words), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    assert_eq!(names_in(&scratch.path("benches/results")), [""; 0]);
    assert_eq!(keep("good.json", &|_| ()), (Some(0), String::new()));
    let whole = ["by-hand-2026-01-01.md", "by-hand-2026-01-01.svg"];
    assert_eq!(names_in(&scratch.path("benches/results")), whole);
    for (part, code) in [("../rows", 1), ("rows", 0), ("rows", 0)] {
        let output = script(&scratch, "keep-result", &["good.json", part], &scratch.program());
        assert_eq!(output.status.code(), Some(code), "{part}: {output:?}");
    }
    let part = ["by-hand-rows-2026-01-01.md", "by-hand-rows-2026-01-01.svg"];
    assert_eq!(names_in(&scratch.path("benches/results")), [whole, part].concat());
}

/// Keeps results, and returns the names in the folder and the page.
fn kept(results: &Results, part: &[&str]) -> (Vec<String>, String) {
    let scratch = new_scratch();
    let mut results = results.clone();
    results.environment.wideleaf = "0.9.0 (0123456789ab)".into();
    file(&scratch, "r.json", &results);
    let output = script(&scratch, "keep-result", &[&["r.json"][..], part].concat(), &scratch.program());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let page = String::from_utf8(output.stdout).unwrap();
    let text = fs::read_to_string(scratch.path(page.trim())).unwrap();
    (names_in(&scratch.path("benches/results")), text)
}

#[test]
fn each_picture_of_a_page_is_kept_under_a_name_of_its_own() {
    let (names, page) = kept(&results("two-dimensional", 1.5), &[]);
    let pictures = ["two-dimensional-2026-01-01-2.svg", "two-dimensional-2026-01-01.svg"];
    assert_eq!(names, [pictures[0], "two-dimensional-2026-01-01.md", pictures[1]]);
    for picture in pictures {
        assert_eq!(page.matches(&format!("]({picture})")).count(), 1, "{picture} in {page}");
    }
    assert_eq!(page.matches("\n![").count(), 2, "{page}");
}

#[test]
fn a_page_beside_published_figures_has_the_reasons_and_the_actions() {
    let mut published = results("freebsd", 1.5);
    published.experiment.arms.push(Arm { name: "guest auto".into(), summary: String::new() });
    published.experiment.cases[0].cells.push(Cell::Absent("only with --long: a run takes about 70 s".into()));
    for run in &mut published.runs {
        if let RunOutcome::Measured(measured) = &mut run.outcome {
            let swaps = Actions { count: 132, cpu_ms: Some(1.0), unavailable_max_us: None };
            measured.actions.insert("swap.done".into(), swaps);
        }
    }
    let (names, page) = kept(&published, &["rows"]);
    assert_eq!(names, ["freebsd-rows-2026-01-01.md", "freebsd-rows-2026-01-01.svg"]);
    for said in [
        "## Left out\n\nMeasured in a process: 1 of 1 rows; in guests: 0.\n",
        "| only with --long | guests | GUPS (70 s) |",
        "| GUPS | auto | swap.done | 132 | 1.000 |",
        " A run of some rows of `freebsd`; its own page has the others.",
    ] {
        assert!(page.contains(said), "{said} in {page}");
    }
    assert!(!page.contains("## What was run") && !page.contains("\n\n\n"), "{page}");
    let mut other = published;
    other.experiment.name = "by-hand".into();
    let (_, page) = kept(&other, &[]);
    assert!(page.contains("## Left out") && !page.contains("## Cost of actions"), "{page}");
}

/// A wideleaf-lab that makes grids for the build `new`, and says what it does: `resume` or `output`.
const MAKES_GRIDS: &str = r#"#!/bin/sh
say() { echo "$1" >>said; }
put() { printf '{"environment":{"wideleaf":"%s"},"is_complete":true,"runs":[]}' "$1" >"$2"; }
case $2,$4 in
run,--resume)
    say resume
    grep -q '"wideleaf":"new' "$5" || exit 2
    ;;
run,--output)
    say output
    [ ! -e "$5" ] || exit 7
    put new "$5"
    ;;
report,*)
    # report FILE --format markdown --output PAGE --svg FOLDER
    echo page >"$7" && mkdir "$9" && echo picture >"$9/01-grid.svg"
    ;;
esac
"#;

#[test]
fn a_grid_of_another_or_of_a_changed_build_begins_anew() {
    let scratch = new_scratch();
    let lab = scratch.file("lab", MAKES_GRIDS.as_bytes());
    fs::set_permissions(&lab, fs::Permissions::from_mode(0o755)).unwrap();
    let grid = scratch.path("target/grid.json");
    let stored = |build: &str| format!(r#"{{"environment":{{"wideleaf":"{build}"}},"is_complete":true,"runs":[]}}"#);
    let cases = [
        (None, "output\n", "new"),
        (Some("new"), "resume\n", "new"),
        (Some("old"), "resume\noutput\n", "new"),
        (Some("new-dirty"), "output\n", "new"),
    ];
    for (before, said, after) in cases {
        scratch.file("said", b"");
        if let Some(before) = before {
            fs::write(&grid, stored(before)).unwrap();
        }
        let output = script(&scratch, "grid", &[], Path::new(&lab));
        assert!(output.status.success(), "{before:?}: {}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(fs::read_to_string(scratch.path("said")).unwrap(), said, "{before:?}");
        assert_eq!(fs::read_to_string(&grid).unwrap(), stored(after), "{before:?}");
    }
    assert_eq!(names_in(&scratch.path("benches/data")), ["grid.csv"]);
}

/// Results of a run of `two-dimensional` in a lab, in which the cells that `fails` names have no counts.
fn counted_in_a_lab(fails: &[(&str, &str)]) -> String {
    let cell = |guest: &str, host: &str| {
        let outcome = if fails.contains(&(guest, host)) {
            json!({"failed": "the guest was killed"})
        } else {
            json!({"measured": {"metrics": {"pages_4k": 8255.0, "pages_2m": 0.0, "pages_1g": 0.0}}})
        };
        json!({"case": format!("GUPS 2^22, guest {guest}"), "arm": format!("host {host}"), "outcome": outcome})
    };
    let pages = ["4k", "2m", "1g"];
    let runs: Vec<Value> = pages.iter().flat_map(|guest| pages.iter().map(|host| cell(guest, host))).collect();
    json!({"environment": {"kernel": "7.3.4-cloud"}, "runs": runs}).to_string()
}

#[test]
fn rows_of_mappings_come_from_the_newest_kernel_of_a_lab_and_only_if_all_cells_have_counts() {
    let scratch = new_scratch();
    fs::create_dir_all(scratch.path("guest-tests/lab")).unwrap();
    let count = |arguments: &[&str], said: &str, status: u8| {
        let lab = scratch.file(
            "guest-tests/lab/lab",
            format!("#!/bin/sh\necho \"$@\" >asked\ncat <<'END'\n{said}\nEND\nexit {status}\n").as_bytes(),
        );
        fs::set_permissions(&lab, fs::Permissions::from_mode(0o755)).unwrap();
        let output = script(&scratch, "lab-mappings", arguments, &scratch.program());
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let (code, rows, said) = count(&["ept"], &counted_in_a_lab(&[]), 0);
    assert_eq!((code, rows.lines().count(), rows.lines().next()), (Some(0), 9, Some("ept,4k,4k,8255,0,0")), "{said}");
    assert_eq!(said, "lab-mappings: ept, Linux 7.3.4-cloud\n", "the head of the table names it");
    assert!(fs::read_to_string(scratch.path("asked")).unwrap().starts_with("ept --kernel newest --timeout 3000 "));
    count(&["npt", "6.12"], &counted_in_a_lab(&[]), 0);
    assert!(fs::read_to_string(scratch.path("asked")).unwrap().starts_with("npt --kernel 6.12 "));

    let (code, rows, said) = count(&["npt"], &counted_in_a_lab(&[("2m", "1g")]), 0);
    assert_eq!((code, rows.as_str()), (Some(1), ""), "{said}");
    assert!(said.contains("guest 2m, host 1g: ") && said.contains("the guest was killed"), "{said}");
    assert!(said.ends_with("lab-mappings: 8 of 9 cells have counts, so no row is printed\n"), "{said}");
    let (code, rows, said) = count(&["npt"], "cannot reserve a page", 1);
    assert_eq!((code, rows.as_str()), (Some(1), ""), "{said}");
    assert_eq!(said, "cannot reserve a page\nlab-mappings: the experiment failed in the lab (1)\n");
    for wrong in [&[][..], &["shadow"]] {
        let (code, _, said) = count(wrong, "", 0);
        assert_eq!((code, said.as_str()), (Some(2), "usage: lab-mappings npt|ept [KERNEL]\n"));
    }
}
