//! The options of `wideleaf run` for devices of the guest, parsed without a look at the files and interfaces that they
//! name.

use std::path::PathBuf;

use clap::Args;
use wideleaf_policies::Bytes;
use wideleaf_run::spec::{DeviceSpec, NetOptions, VsockOptions};
use wideleaf_vmm::devices::virtio::block::DiskOptions;
use wideleaf_vmm::devices::virtio::net::Mac;
use wideleaf_vmm::devices::virtio::vsock::{GUEST_CID_MAX, GUEST_CID_MIN};

/// Devices that a guest has.
#[derive(Args, Clone, Debug, Default)]
pub struct DeviceArgs {
    /// Disk: a file of whole sectors, or a block device. `,readonly`: the guest cannot write it, and several guests
    /// may share it; `,id=NAME`: name that the guest reads [default: that of the file]. Repeatable: the first is
    /// the guest's first disk
    #[arg(
        long = "disk",
        value_name = "FILE[,readonly][,id=NAME]",
        value_parser = parse_disk,
        conflicts_with = "native"
    )]
    pub disks: Vec<DiskOptions>,

    /// Network card on this tap of the host; as root, a missing tap is created for the run. `,mac=`: address of the
    /// card [default: derived from the host's and the tap's name, the same at every run]. Repeatable: the first is
    /// the guest's first card
    #[arg(
        long = "net",
        value_name = "tap=NAME[,mac=AA:BB:CC:DD:EE:FF]",
        value_parser = parse_card,
        conflicts_with = "native"
    )]
    pub cards: Vec<NetOptions>,

    /// Sockets between guest and host (AF_VSOCK) under this guest address: a host program that connects to PATH and
    /// sends `CONNECT PORT` reaches that port of the guest, and the guest's connections go to PATH_PORT
    #[arg(long, value_name = "cid=N,socket=PATH", value_parser = parse_vsock, conflicts_with = "native")]
    pub vsock: Option<VsockOptions>,

    /// Balloon that takes SIZE of the guest's RAM: a Linux guest gives back unused memory and reports free pages.
    /// Huge pages stay whole when only a part of one is given back [without SIZE: 0]
    #[arg(
        long,
        value_name = "SIZE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "0",
        value_parser = Bytes::parse,
        conflicts_with = "native"
    )]
    pub balloon: Option<Bytes>,

    /// Source of random bytes, from the host
    #[arg(long, conflicts_with = "native")]
    pub rng: bool,
}

impl From<&DeviceArgs> for DeviceSpec {
    fn from(args: &DeviceArgs) -> DeviceSpec {
        let DeviceArgs { disks, cards, vsock, balloon, rng } = args.clone();
        DeviceSpec { disks, cards, vsock, balloon, has_rng: rng }
    }
}

/// Parses `FILE[,readonly][,id=NAME]`. A comma in the file's name is written twice.
fn parse_disk(text: &str) -> Result<DiskOptions, String> {
    let mut words = words(text).into_iter();
    let path = words.next().filter(|path| !path.is_empty()).ok_or("there is no file: name it first")?;
    let mut options = DiskOptions { path: PathBuf::from(path), ..DiskOptions::default() };
    for word in words {
        match word.split_once('=') {
            None if word == "readonly" && !options.is_read_only => options.is_read_only = true,
            Some(("id", name)) if options.id.is_none() => options.id = Some(name.to_owned()),
            _ => {
                return Err(format!(
                    "unknown setting {word:?} after the file: use `readonly` and `id=NAME`, each at most once; write \
                    a comma in a name twice"
                ));
            }
        }
    }
    Ok(options)
}

/// The words between single commas.
pub(super) fn words(text: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        let is_comma = character == ',';
        if is_comma && characters.next_if_eq(&',').is_none() {
            words.push(String::new());
        } else {
            words.last_mut().expect("it begins with one").push(character);
        }
    }
    words
}

/// Parses `tap=NAME[,mac=AA:BB:CC:DD:EE:FF]`.
fn parse_card(text: &str) -> Result<NetOptions, String> {
    let (mut tap, mut mac) = (None, None);
    for word in text.split(',') {
        match word.split_once('=') {
            Some(("tap", name)) if tap.is_none() => tap = Some(name.to_owned()),
            Some(("mac", address)) if mac.is_none() => mac = Some(address.parse::<Mac>().map_err(|e| e.to_string())?),
            _ => return Err(format!("unknown {word:?}: use `tap=NAME` and `mac=AA:BB:CC:DD:EE:FF`, each once")),
        }
    }
    let tap = tap.filter(|name| !name.is_empty()).ok_or("there is no tap: name it with tap=NAME")?;
    Ok(NetOptions { tap, mac })
}

/// Parses `cid=N,socket=PATH`. The path is last, so that it may contain commas.
fn parse_vsock(text: &str) -> Result<VsockOptions, String> {
    let form = "write cid=N,socket=PATH";
    let (cid, socket) = text.strip_prefix("cid=").and_then(|rest| rest.split_once(",socket=")).ok_or(form)?;
    let number = cid.parse().ok().filter(|cid| (GUEST_CID_MIN..=GUEST_CID_MAX).contains(cid));
    let cid = number.ok_or_else(|| format!("cid={cid} is not a guest's: use {GUEST_CID_MIN} to {GUEST_CID_MAX}"))?;
    if socket.is_empty() {
        return Err(form.to_owned());
    }
    Ok(VsockOptions { cid, socket: socket.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_a_file_with_settings() {
        let disk = |path: &str, is_read_only, id: Option<&str>| {
            Ok(DiskOptions { path: path.into(), is_read_only, id: id.map(str::to_owned) })
        };
        assert_eq!(parse_disk("a.img"), disk("a.img", false, None));
        assert_eq!(parse_disk("a,,b.img,id=root,readonly"), disk("a,b.img", true, Some("root")));
        assert_eq!(parse_disk("a,,,readonly"), disk("a,", true, None));
        for bad in ["", ",readonly", "a,ro", "a,readonly,readonly", "a,id=x,id=y", "a,", "a,readonly=1"] {
            assert!(parse_disk(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_card_is_a_tap_and_perhaps_an_address() {
        assert_eq!(parse_card("tap=tap0"), Ok(NetOptions { tap: "tap0".into(), mac: None }));
        let both = parse_card("mac=52:54:00:00:00:01,tap=tap0").expect("both are said");
        assert_eq!(
            (both.tap.as_str(), both.mac.expect("it is said").to_string().as_str()),
            ("tap0", "52:54:00:00:00:01")
        );
        for bad in ["", "tap0", "tap=", "mac=52:54:00:00:00:01", "tap=a,tap=b", "tap=a,mac=1", "tap=a,", "tap=a,mtu=9"]
        {
            assert!(parse_card(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn sockets_are_an_address_and_a_path() {
        assert_eq!(parse_vsock("cid=3,socket=/run/a,b"), Ok(VsockOptions { cid: 3, socket: "/run/a,b".into() }));
        for bad in [
            "",
            "cid=3",
            "cid=3,socket=",
            "socket=/a,cid=3",
            "cid=2,socket=/a",
            "cid=4294967295,socket=/a",
            "cid=x,socket=/a",
        ] {
            assert!(parse_vsock(bad).is_err(), "{bad:?}");
        }
    }
}
