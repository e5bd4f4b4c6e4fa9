//! No circle of files: the files of a crate import each other one way, but for a module and its children.
//!
//! ```text
//!   manager.rs ◀──▶ manager/acting.rs ──▶ manager/guards.rs       parent and child may name each other
//!        │                                     │
//!        ▼                                     ▼
//!   host.rs ──▶ sys/mapping.rs                …                   everything else is one way
//! ```
//!
//! A name that a module re-exports counts as an import of the file that defines it. Tests inside files do not count.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::LazyLock;

use regex::Regex;

use super::root;

/// Crates without circles, by folder.
const CRATES: [&str; 27] = [
    "policies",
    "memory",
    "snapshot",
    "measure",
    "testing",
    "run",
    "cli",
    "operator/attach",
    "operator/control",
    "operator/daemon",
    "operator/node",
    "vmm",
    "guests/kernels",
    "guests/image/freestanding",
    "guests/linux/init",
    "guests/protocol",
    "guests/trace",
    "guests/recorder",
    "guests/recorder/program",
    "guests/image",
    "guests/linux",
    "guest-tests",
    "benches",
    "benches/experiments",
    "benches/lab",
    "benches/simulator",
    "fleet",
];

// Compiled once: unoptimised, that takes as long as a search in many files.
static COMMENT: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"(?m)//.*$").unwrap());
static ONLY_IN_TESTS: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"(?m)^( *)#\[cfg\((?:test|any\(test, [^\n]*\))\)\]\n").unwrap());
static TEST_MODULE: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"^ *(?:pub )?mod (\w+);").unwrap());
static USE_ITEM: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"(?ms)^\s*(?:pub(?:\([^)]*\))?\s+)?use\s+([^;]+);").unwrap());
static PATH_IN_CODE: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\b\w+(?:::\w+)+").unwrap());

/// Path of a module from its crate's root.
type Module = Vec<String>;

/// The production code of each file, by module.
type Files = BTreeMap<Module, String>;

/// Imports of each file: the modules that it names.
type Imports = BTreeMap<Module, BTreeSet<Module>>;

#[test]
fn files_import_each_other_one_way() {
    let (mut wrong, mut arrows) = (String::new(), 0);
    for folder in CRATES {
        let files = files_of(&root().join(folder).join("src"));
        assert!(!files.is_empty(), "{folder} has no files");
        let imports = imports(&files);
        arrows += imports.values().map(BTreeSet::len).sum::<usize>();
        for circle in circles(&imports, &files.keys().cloned().collect()) {
            let circle = describe(&circle, &imports);
            let _ = writeln!(wrong, "files of {folder} import each other in a circle:\n{circle}");
        }
    }
    assert!(arrows > 1000, "{arrows} imports only");
    assert!(wrong.is_empty(), "{wrong}");
}

/// One line for each import inside a circle.
fn describe(circle: &BTreeSet<Module>, imports: &Imports) -> String {
    let inside = |file: &Module| imports[file].intersection(circle).map(|used| used.join("::")).collect::<Vec<_>>();
    let line = |file: &Module| format!("  {} uses {}", file.join("::"), inside(file).join(", "));
    circle.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn files_of(src: &Path) -> Files {
    let mut files = Files::new();
    for entry in ignore::WalkBuilder::new(src).build() {
        let entry = entry.unwrap();
        let path = entry.path().strip_prefix(src).unwrap();
        if path.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let mut module: Module = path.with_extension("").iter().map(|part| part.to_str().unwrap().to_owned()).collect();
        if ["lib", "main", "mod"].contains(&module.last().unwrap().as_str()) {
            module.pop();
        }
        files.insert(module, std::fs::read_to_string(entry.path()).unwrap());
    }
    without_tests(files)
}

/// The files without comments and without everything that is compiled for tests only.
fn without_tests(mut files: Files) -> Files {
    let mut excluded: Vec<Module> = Vec::new();
    for (module, text) in &mut files {
        let mut code = COMMENT.replace_all(text, "").into_owned();
        while let Some(attribute) = ONLY_IN_TESTS.captures(&code) {
            let (whole, indent) = (attribute.get(0).unwrap().range(), attribute[1].to_owned());
            let rest = &code[whole.end..];
            if let Some(name) = TEST_MODULE.captures(rest) {
                excluded.push(module.iter().cloned().chain([name[1].to_owned()]).collect());
            }
            // An item ends with its first line, or with the brace at its own depth.
            let first_line = rest.lines().next().unwrap_or_default();
            let closing = format!("\n{indent}}}");
            let end = match first_line.ends_with(['{', '(', ',']) {
                true => rest.find(&closing).map_or(rest.len(), |at| at + closing.len()),
                false => first_line.len(),
            };
            code.replace_range(whole.start..whole.end + end, "");
        }
        *text = code;
    }
    files.retain(|module, _| !excluded.iter().any(|excluded| module.starts_with(excluded)));
    files
}

/// Paths of a `use` tree, without its new names.
fn paths(tree: &str) -> Vec<Vec<String>> {
    let tree = tree.trim();
    let Some((prefix, group)) = tree.split_once('{') else {
        let path = tree.split(" as ").next().unwrap();
        return vec![path.split("::").map(|segment| segment.trim().to_owned()).collect()];
    };
    let prefix: Vec<String> =
        prefix.split("::").map(|segment| segment.trim().to_owned()).filter(|segment| !segment.is_empty()).collect();
    let group = group.trim_end().strip_suffix('}').unwrap_or(group);
    let (mut depth, mut parts) = (0_usize, vec![String::new()]);
    for letter in group.chars() {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        parts.last_mut().unwrap().push(letter);
    }
    let whole = |path: Vec<String>| prefix.iter().cloned().chain(path).collect();
    parts.iter().filter(|part| !part.trim().is_empty()).flat_map(|part| paths(part)).map(whole).collect()
}

/// All paths that a file names: those of its `use` items, and those in the code.
fn named(code: &str) -> Vec<Vec<String>> {
    let used = USE_ITEM.captures_iter(code).flat_map(|item| paths(&item[1]));
    let code = USE_ITEM.replace_all(code, "");
    let inline: Vec<_> = PATH_IN_CODE.find_iter(&code).flat_map(|path| paths(path.as_str())).collect();
    used.chain(inline).collect()
}

fn imports(files: &Files) -> Imports {
    let named: BTreeMap<&Module, Vec<Vec<String>>> = files.iter().map(|(file, code)| (file, named(code))).collect();
    let used = |file: &Module| {
        let target = |path: &Vec<String>| definition(file, path, files, &named, 0);
        named[file].iter().filter_map(target).filter(|target| target != file).collect()
    };
    files.keys().map(|file| (file.clone(), used(file))).collect()
}

/// The file that defines what `path` means in `file`; `None` outside the crate.
fn definition(
    file: &Module,
    path: &[String],
    files: &Files,
    named: &BTreeMap<&Module, Vec<Vec<String>>>,
    depth: usize,
) -> Option<Module> {
    /// Chains of re-exports are short; a module that imports itself would be endless.
    const DEPTH_MAX: usize = 8;
    let child = |module: &Module, name: &str| {
        let child: Module = module.iter().cloned().chain([name.to_owned()]).collect();
        files.contains_key(&child).then_some(child)
    };
    let mut segments = path.iter();
    let mut at = match segments.next()?.as_str() {
        "crate" => Module::new(),
        "self" => file.clone(),
        "super" => file[..file.len().checked_sub(1)?].to_vec(),
        name => child(file, name)?,
    };
    for segment in segments {
        if segment == "super" {
            at.pop();
        } else if let Some(child) = child(&at, segment) {
            at = child;
        } else {
            // A name of this module: its own, or one that it imports.
            let is_it = |path: &&Vec<String>| path.len() > 1 && path.last() == Some(segment);
            let imported = named.get(&at)?.iter().filter(is_it).filter(|_| depth < DEPTH_MAX);
            let origin = imported.filter_map(|path| definition(&at, path, files, named, depth + 1)).next();
            return Some(origin.unwrap_or(at));
        }
    }
    Some(at)
}

/// The circles among `files` that are more than parent and child: a circle may contain one module above all the others,
/// which then must not be a circle without it.
fn circles(imports: &Imports, files: &BTreeSet<Module>) -> Vec<BTreeSet<Module>> {
    let mut found = Vec::new();
    let mut left = files.clone();
    while let Some(file) = left.pop_first() {
        let reached = reachable(&file, files, |from, to| imports[from].contains(to));
        let reaching = reachable(&file, files, |from, to| imports[to].contains(from));
        let circle: BTreeSet<Module> = reached.intersection(&reaching).cloned().collect();
        left = left.difference(&circle).cloned().collect();
        if circle.len() < 2 {
            continue;
        }
        match circle.iter().find(|parent| circle.iter().all(|file| file.starts_with(parent))) {
            Some(parent) => {
                let children = circle.iter().filter(|file| *file != parent).cloned().collect();
                found.extend(circles(imports, &children));
            }
            None => found.push(circle),
        }
    }
    found
}

/// All of `files` that arrows lead to from `start`, and itself.
fn reachable(
    start: &Module,
    files: &BTreeSet<Module>,
    is_arrow: impl Fn(&Module, &Module) -> bool,
) -> BTreeSet<Module> {
    let (mut reached, mut next) = (BTreeSet::from([start.clone()]), vec![start.clone()]);
    while let Some(from) = next.pop() {
        for to in files.iter().filter(|to| is_arrow(&from, to)) {
            if reached.insert(to.clone()) {
                next.push(to.clone());
            }
        }
    }
    reached
}

fn crate_of(files: &[(&str, &str)]) -> Vec<String> {
    let module = |path: &str| path.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect::<Module>();
    let files = without_tests(files.iter().map(|(path, code)| (module(path), (*code).to_owned())).collect());
    let imports = imports(&files);
    let circles = circles(&imports, &files.keys().cloned().collect());
    circles.iter().map(|circle| circle.iter().map(|file| file.join("::")).collect::<Vec<_>>().join(" ")).collect()
}

#[test]
fn a_parent_and_its_children_are_no_circle_unless_the_children_make_one() {
    let parent = ("a", "pub use b::B;\nmod b;\nmod c;\n");
    assert_eq!(crate_of(&[parent, ("a::b", "use super::A;\n"), ("a::c", "use super::{A, B};\n")]), [""; 0]);
    let circle = [parent, ("a::b", "use super::c::C;\n"), ("a::c", "use super::B;\n")];
    assert_eq!(crate_of(&circle), ["a::b a::c"]);
}

#[test]
fn a_child_that_its_parent_names_by_a_path_alone_is_imported() {
    let parent = ("a", "mod b;\nfn f() {\n    b::g();\n}\n");
    assert_eq!(crate_of(&[parent, ("a::b", "use crate::c::C;\n"), ("c", "use crate::a::A;\n")]), ["a a::b c"]);
}

#[test]
fn a_circle_is_found_through_re_exports_and_paths_and_not_in_tests() {
    let reexport = ("", "pub use host::linux::Linux;\n");
    let host = ("host::linux", "fn open() -> crate::ram::Ram {}\n");
    let ram = |code| [reexport, ("host", "mod linux;\n"), host, ("ram", code)];
    assert_eq!(crate_of(&ram("use crate::{Linux, other::Other};\n")), ["host::linux ram"]);
    assert_eq!(crate_of(&ram("#[cfg(test)]\nmod tests {\n    use crate::Linux;\n}\n")), [""; 0]);
    assert_eq!(crate_of(&ram("/// [`crate::Linux`]\nstruct Ram;\n")), [""; 0]);
}
