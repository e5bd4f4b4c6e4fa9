//! Finds the parts of an option's value that are paths: paths in a file are relative to its folder, printed ones
//! are absolute.
//!
//! ```text
//!   record = "a.rec"                    an option with a path as its type          ─▶ /etc/vms/a.rec
//!   policy = "schemes:rules=@a.txt"     text after an @                            ─▶ schemes:rules=@/etc/vms/a.txt
//!   some-device = "path=a.img,slot=3"   path=, file= and socket= among settings    ─▶ path=/etc/vms/a.img,slot=3
//!   disk = ["a.img,readonly"]           the first word                             ─▶ /etc/vms/a.img,readonly
//!   incoming = "unix:a.sock"            text after unix:                           ─▶ unix:/etc/vms/a.sock
//!   workload = "./vmlinuz"              not a built-in kernel                      ─▶ /etc/vms/vmlinuz
//! ```

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use clap::{Arg, ValueHint};
use wideleaf_kernels::registry::by_name;
use wideleaf_run::output_file::is_standard_output;

use crate::run::devices::words;

/// Settings within a value that are paths.
const PATH_SETTINGS: [&str; 3] = ["path", "file", "socket"];

/// Name of the positional argument of `run`.
const WORKLOAD: &str = "workload";

/// Options that stay as they are: a path below the cgroup mount, and text for the guest.
const AS_WRITTEN: [&str; 2] = ["cgroup", "cmdline"];

/// `value` with paths relative to `folder` resolved.
pub(super) fn from_file(arg: &Arg, value: &str, folder: &Path) -> OsString {
    mapped(arg, OsStr::new(value), &|path| folder.join(path))
}

/// `value` with absolute paths.
pub(super) fn absolute(arg: &Arg, value: &OsStr) -> OsString {
    mapped(arg, value, &|path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned()))
}

fn mapped(arg: &Arg, value: &OsStr, map: &dyn Fn(&Path) -> PathBuf) -> OsString {
    let id = arg.get_id().as_str();
    if value.is_empty() || AS_WRITTEN.contains(&id) || (id == "output" && is_standard_output(Path::new(value))) {
        return value.to_owned();
    }
    // A name that begins with a dash would be an option.
    let mapped_path = |path: &OsStr| map(&Path::new(".").join(path)).components().collect::<PathBuf>();
    if is_path(arg, value) {
        return mapped_path(value).into_os_string();
    }
    match (id, value.to_str()) {
        (WORKLOAD, _) | (_, None) => value.to_owned(),
        ("disks", Some(text)) => disk_with(text, |file| mapped_path(file.as_ref())).into(),
        ("incoming", Some(text)) => match text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            Some(path) => format!("unix:{}", mapped_path(path.as_ref()).display()).into(),
            None => value.to_owned(),
        },
        (_, Some(text)) => settings_with(text, map).into(),
    }
}

/// A disk's value, in which a comma of a word is written twice.
fn disk_with(text: &str, map: impl Fn(&str) -> PathBuf) -> String {
    let mut words = words(text);
    if !words[0].is_empty() {
        words[0] = map(&words[0]).display().to_string();
    }
    words.iter().map(|word| word.replace(',', ",,")).collect::<Vec<_>>().join(",")
}

fn settings_with(text: &str, map: &dyn Fn(&Path) -> PathBuf) -> String {
    // The text before the first colon is a name, as in `policy`. A colon in a setting belongs to its value.
    let name_and_settings = text.split_once(':').filter(|(name, _)| !name.contains('='));
    let (name, settings) = name_and_settings.unwrap_or(("", text));
    let settings: Vec<String> = settings.split(',').map(|setting| setting_with(setting, map)).collect();
    if name.is_empty() { settings.join(",") } else { format!("{name}:{}", settings.join(",")) }
}

fn is_path(arg: &Arg, value: &OsStr) -> bool {
    match arg.get_value_hint() {
        ValueHint::AnyPath | ValueHint::FilePath | ValueHint::DirPath | ValueHint::ExecutablePath => true,
        _ => arg.get_id() == WORKLOAD && value.to_str().is_none_or(|name| by_name(name).is_none()),
    }
}

fn setting_with(setting: &str, map: &dyn Fn(&Path) -> PathBuf) -> String {
    let Some((key, value)) = setting.split_once('=').filter(|(_, value)| !value.is_empty()) else {
        return setting.to_owned();
    };
    match value.strip_prefix('@') {
        Some(path) => format!("{key}=@{}", map(Path::new(path)).display()),
        None if PATH_SETTINGS.contains(&key) => format!("{key}={}", map(Path::new(value)).display()),
        None => setting.to_owned(),
    }
}
