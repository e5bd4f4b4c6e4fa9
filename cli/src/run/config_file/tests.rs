#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::ffi::OsStr;

use clap::{Arg, ArgAction};

use super::*;

/// Example values of options; a new kind of value must be added here.
const CANDIDATES: [&str; 17] = [
    "1",
    "95%",
    "64M",
    "4k",
    "1s",
    "anon",
    "fail",
    "table",
    "auto",
    "stop",
    "text",
    "@text",
    "path=text,file=text",
    "tap=text",
    "cid=3,socket=text",
    "id=0,cpus=[0-1],host-nodes=[0]",
    "stdio",
];

/// Arguments as if typed, without a file.
fn typed(words: &[OsString]) -> Result<ArgMatches, clap::Error> {
    let all = ["wideleaf", RUN, "--config=-"].map(OsString::from);
    let matches = Cli::command().try_get_matches_from(all.iter().chain(words))?;
    Ok(matches.subcommand_matches(RUN).unwrap().clone())
}

/// Whether clap accepts it, apart from other required arguments.
fn is_taken(words: &[OsString]) -> bool {
    typed(words).is_ok_and(|_| true)
}

/// All options that may be in a file, each with arguments that may be typed for it.
fn each_option() -> Vec<(Arg, Vec<OsString>)> {
    let command = run_command();
    let each = options(&command).map(|arg| {
        let key = key_of(arg);
        if arg.is_positional() {
            return (arg.clone(), vec!["gups".into()]);
        }
        if !arg.get_action().takes_values() {
            return (arg.clone(), vec![format!("--{key}").into()]);
        }
        let possible: Vec<String> = arg.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect();
        let candidates = possible.into_iter().chain(CANDIDATES.map(str::to_owned));
        let found = candidates.map(|value| vec![format!("--{key}={value}").into()]).find(|words| is_taken(words));
        (arg.clone(), found.unwrap_or_else(|| panic!("no value in CANDIDATES is valid for --{key}: add one")))
    });
    each.collect()
}

fn value_in(arg: &Arg, words: &[OsString]) -> String {
    let word = words[0].to_str().unwrap();
    match (arg.is_positional(), word.split_once('=')) {
        (true, _) => format!("{word:?}"),
        (false, Some((_, value))) if matches!(arg.get_action(), ArgAction::Append) => format!("[{value:?}, {value:?}]"),
        (false, Some((_, value))) => format!("{value:?}"),
        (false, None) => "true".to_owned(),
    }
}

fn read(text: &str) -> Result<Vec<Entry>, String> {
    let wrong = |wrong: entries::FileError| format!("{}: {}", wrong.line, wrong.why);
    entries::read(text, &run_command(), Path::new("/vms")).map_err(wrong)
}

fn words_of(text: &str) -> Vec<OsString> {
    read(text).unwrap().into_iter().flat_map(|entry| entry.arguments).collect()
}

fn raw(matches: &ArgMatches, arg: &Arg) -> Vec<OsString> {
    let raw = matches.get_raw(arg.get_id().as_str()).into_iter().flatten();
    raw.map(OsStr::to_owned).collect()
}

#[test]
fn every_option_of_run_may_be_in_a_file_and_means_the_same_as_when_typed() {
    for (arg, words) in each_option() {
        let key = key_of(&arg);
        let entries = read(&format!("{key} = {}", value_in(&arg, &words))).unwrap();
        entries.iter().for_each(|entry| check_alone(entry).unwrap());
        let from_file = typed(&entries[0].arguments).unwrap_or_else(|error| panic!("{key}: {error}"));
        let as_typed: Vec<OsString> = raw(&typed(&words).unwrap(), &arg)
            .iter()
            .map(|value| {
                if arg.get_action().takes_values() {
                    paths::from_file(&arg, value.to_str().unwrap(), Path::new("/vms"))
                } else {
                    value.clone()
                }
            })
            .collect();
        let mut found = raw(&from_file, &arg);
        found.dedup();
        assert_eq!(found, as_typed, "{key}");
    }
}

#[test]
fn a_printed_configuration_means_the_same_when_it_is_read() {
    for (arg, words) in each_option() {
        let before = typed(&words).unwrap();
        let text = printed::text(&run_command(), &before).unwrap();
        let after = typed(&words_of(&text)).unwrap_or_else(|error| panic!("{text}{error}"));
        assert_eq!(printed::text(&run_command(), &after).unwrap(), text, "{}", key_of(&arg));
        let said = |matches: &ArgMatches| matches.value_source(arg.get_id().as_str());
        assert_eq!(said(&after), Some(ValueSource::CommandLine), "{}: {text}", key_of(&arg));
    }
}

#[test]
fn numbers_and_flags_need_no_quotes_and_a_flag_may_be_off() {
    assert_eq!(
        words_of("vcpus = 2\nmemory = 0x4000_0000\nprefault = true\nno-daemon = false"),
        ["--vcpus=2", "--memory=1073741824", "--prefault"]
    );
}

#[test]
fn paths_begin_at_the_files_folder() {
    let text = "workload = \"./vmlinuz\"\ninitrd = \"/boot/initrd\"\nrecord = \"../a.rec\"\n\
                policy = \"schemes:rules=@a.txt,quota_windows=8\"";
    assert_eq!(
        words_of(text),
        [
            "/vms/vmlinuz",
            "--initrd=/boot/initrd",
            "--record=/vms/../a.rec",
            "--policy=schemes:rules=@/vms/a.txt,quota_windows=8"
        ]
    );
    assert_eq!(words_of("workload = \"gups\""), ["gups"]);
    assert_eq!(words_of("workload = \"-x\""), ["/vms/-x"]);
}

#[test]
fn paths_that_are_only_a_part_of_a_value_begin_at_the_files_folder_too() {
    let text = "disk = [\"root.img,readonly\", \"a,,b.img,id=x\"]\nincoming = \"unix:s\"\n\
                vsock = \"cid=3,socket=v:1\"";
    assert_eq!(
        words_of(text),
        [
            "--disk=/vms/root.img,readonly",
            "--disk=/vms/a,,b.img,id=x",
            "--incoming=unix:/vms/s",
            "--vsock=cid=3,socket=/vms/v:1"
        ]
    );
}

#[test]
fn what_only_looks_like_a_path_stays() {
    let text = "cgroup = \"a/b\"\noutput = \"-\"\nincoming = \"tcp:host:1\"\ncmdline = \"file=a,b=@c\"";
    assert_eq!(words_of(text), ["--cgroup=a/b", "--output=-", "--incoming=tcp:host:1", "--cmdline=file=a,b=@c"]);
}

#[test]
fn a_printed_disk_has_an_absolute_path() {
    let text = printed::text(&run_command(), &typed(&["--disk=root.img".into()]).unwrap()).unwrap();
    let absolute = std::path::absolute("root.img").unwrap();
    assert!(text.contains(&format!("\"{}\"", absolute.display())), "{text}");
}

#[test]
fn a_mistake_is_reported_with_its_line_and_the_valid_forms() {
    let wrong = |text: &str| read(text).unwrap_err();
    assert!(wrong("vcpus = 2\nmemroy = \"1G\"").starts_with("2: unknown key \"memroy\": the keys are backing, "));
    assert!(wrong("config = \"other.toml\"").starts_with("1: unknown key \"config\""));
    assert_eq!(
        wrong("prefault = 1"),
        "1: prefault is a flag, and this is a number: write prefault = true or prefault = false"
    );
    assert_eq!(wrong("\nmemory = [\"1G\"]"), "2: memory takes one value, and this is a list");
    assert!(wrong("[memory]\nsize = 1").starts_with("1: memory is a table: write it as on the command line"));
    assert!(wrong("timeout = 1979-05-27").starts_with("1: timeout is a date"));
    assert!(wrong("vcpus = 1\nvcpus = 2").starts_with("2: this is not TOML: duplicate key"));
    assert!(wrong("vcpus = 1\nvcpus 2").starts_with("2: this is not TOML: "));
    assert!(wrong("cmdline = \"a\\u0000b\"").starts_with("1: cmdline contains a character with code 0"));
}

#[test]
fn a_value_that_its_option_refuses_is_refused_in_a_file_too() {
    let alone = |text: &str| check_alone(&read(text).unwrap()[0]);
    assert_eq!(alone("out-of-reach = \"12.5%\""), Ok(()));
    let why = alone("out-of-reach = \"0%\"").unwrap_err();
    assert!(why.starts_with("out-of-reach: ") && why.contains("write a number from 1 to 100 and a %"), "{why}");
}
