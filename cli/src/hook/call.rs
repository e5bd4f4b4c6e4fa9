//! Actions when libvirt calls its hook.
//!
//! libvirtd waits for a hook, and so does every client of libvirtd. So nothing here takes longer than `WAIT`,
//! except `prepare`, which must be over before QEMU maps its memory. Nothing is asked of libvirt, which would wait
//! for the hook. Nothing is printed on standard output. The only failure is at
//! `prepare`: a guest requests a guarantee that cannot be given, or its metadata have a mistake.

use std::fs;
use std::io::{self, Read};
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use wideleaf_control::client::{self, ClientError};
use wideleaf_control::protocol::Request;
use wideleaf_control::view::Guarantee;
use wideleaf_run::failure::Failure;

use super::domain::Domain;
use super::xml::DOCUMENT_BYTES_MAX;
use super::{RunArgs, journal, last_caller};
use crate::output::say;

/// Time limit for an answer that changes nothing: long enough to see the daemon's refusal in most cases, short
/// enough for fifty guests that libvirtd finds again after its restart.
const WAIT: Duration = Duration::from_millis(300);
/// Time limit at `prepare`. The kernel moves memory to make pages; libvirt itself waits without a limit.
const PREPARE_WAIT: Duration = client::CHANGE_TIMEOUT;
/// Folder where libvirt writes a domain's process id, before `started`.
const PID_FILES: &str = "run/libvirt/qemu";
/// Size of `<hugepages/>` without a size, if the kernel does not report its default: the default on x86-64.
const DEFAULT_PAGE: u64 = 2 << 20;

/// Reason why something was not done.
enum NotDone {
    /// The daemon refused, and has logged it.
    Refused(String),
    /// The daemon is still at work, or hangs.
    Silent(String),
    /// The daemon did not receive it.
    Unheard(String),
}

impl From<String> for NotDone {
    fn from(why: String) -> NotDone {
        NotDone::Unheard(why)
    }
}

impl NotDone {
    fn why(&self) -> &str {
        let (NotDone::Refused(why) | NotDone::Silent(why) | NotDone::Unheard(why)) = self;
        why
    }

    /// Whether the daemon cannot log it itself. A slow answer is worth a line only at `prepare`, because the guest
    /// then starts without it.
    fn is_for_journal(&self, operation: &str) -> bool {
        match self {
            NotDone::Refused(_) => false,
            NotDone::Silent(_) => operation == "prepare",
            NotDone::Unheard(_) => true,
        }
    }
}

/// Carries out the call.
///
/// # Errors
/// [`Failure::Host`] at `prepare` if the domain requests a guarantee that cannot be given, or if its metadata have
/// a mistake.
pub fn main(args: &RunArgs) -> Result<(), Failure> {
    last_caller::record(&args.root);
    match args.operation.as_str() {
        "prepare" => prepare(args),
        "started" | "reconnect" => told(args, started(args)),
        "release" => told(args, release(args)),
        // The XML on standard input stays unread: libvirt allows that.
        _ => Ok(()),
    }
}

/// An error after a guest has started is no reason to end it. What the daemon did not receive is logged on the host
/// instead.
fn told(args: &RunArgs, result: Result<(), NotDone>) -> Result<(), Failure> {
    if let Err(error) = result {
        let line = format!("hook: {} of {}: {}", args.operation, args.name, error.why());
        say(format_args!("wideleaf: {line}"));
        if error.is_for_journal(&args.operation) {
            journal::warn(&args.root, &line);
        }
    }
    Ok(())
}

fn prepare(args: &RunArgs) -> Result<(), Failure> {
    let domain = match domain_on_stdin() {
        Ok(domain) => domain,
        Err(why) => return told(args, Err(why)),
    };
    if !domain.metadata.mistakes.is_empty() {
        let mistakes = domain.metadata.mistakes.join("; ");
        return Err(Failure::Host(format!("cannot use the metadata of {}: {mistakes}", args.name)));
    }
    let (guarantee, ordinary) = (domain.metadata.guarantee(), domain.guaranteed());
    let pages = if domain.metadata.may_grow_pool { domain.pages } else { Vec::new() };
    if pages.is_empty() && guarantee.share().is_none() {
        return Ok(());
    }
    let asked = |pages, ordinary| {
        let (name, uuid) = (args.name.clone(), domain.uuid.clone());
        ask(&args.socket, Request::Prepare { domain: name, uuid, pages, ordinary }, PREPARE_WAIT)
    };
    match (asked(pages.clone(), ordinary), guarantee) {
        (Err(error), Guarantee::Coverage(_)) => {
            Err(Failure::Host(format!("cannot give {} its guarantee: {}", args.name, error.why())))
        }
        (Err(NotDone::Refused(why)), Guarantee::Sought(_)) => {
            started_without(args, guarantee, &why);
            // Too little ordinary memory is no reason to go without the pool's pages.
            if ordinary.is_some() && !pages.is_empty() { told(args, asked(pages, None)) } else { Ok(()) }
        }
        (other, _) => told(args, other),
    }
}

/// Reports a guarantee that the host cannot meet now and that does not prevent the start.
fn started_without(args: &RunArgs, guarantee: Guarantee, why: &str) {
    let line = format!("hook: {} starts below its guarantee of {guarantee}: {why}", args.name);
    say(format_args!("wideleaf: {line}"));
    journal::warn(&args.root, &line);
}

/// The daemon decides whether to manage the guest: it knows its configuration and the detached guests.
fn started(args: &RunArgs) -> Result<(), NotDone> {
    let domain = domain_on_stdin()?;
    let (settings, mistakes, flavor) = (domain.metadata.settings, domain.metadata.mistakes, domain.flavor);
    let (name, uuid, pid) = (args.name.clone(), domain.uuid, pid_of(&args.root, &args.name)?);
    ask(&args.socket, Request::Started { domain: name, uuid, pid, settings, mistakes, flavor }, WAIT)
}

fn release(args: &RunArgs) -> Result<(), NotDone> {
    let uuid = domain_on_stdin()?.uuid;
    ask(&args.socket, Request::Release { domain: args.name.clone(), uuid }, WAIT)
}

/// Reads the XML that libvirt passes.
fn domain_on_stdin() -> Result<Domain, NotDone> {
    let mut bytes = Vec::new();
    // One more byte than the limit shows that the text is longer.
    let mut input = io::stdin().lock().take(DOCUMENT_BYTES_MAX as u64 + 1);
    input.read_to_end(&mut bytes).map_err(|error| format!("cannot read the domain's XML: {error}"))?;
    let text = String::from_utf8(bytes).map_err(|_| "the domain's XML is not UTF-8".to_owned())?;
    Ok(Domain::parse(&text, default_page()).map_err(|error| format!("the domain's XML: {error}"))?)
}

/// The host's default huge page: libvirt's size for `<hugepages/>`.
fn default_page() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = text.lines().find_map(|line| line.strip_prefix("Hugepagesize:")?.trim().strip_suffix(" kB"));
    kib.and_then(|kib| kib.trim().parse::<u64>().ok()).map_or(DEFAULT_PAGE, |kib| kib << 10)
}

fn pid_of(root: &Path, domain: &str) -> Result<u32, String> {
    let path = root.join(PID_FILES).join(format!("{domain}.pid"));
    let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    text.trim().parse().map_err(|_| format!("{}: expected a process id, found {text:?}", path.display()))
}

/// Asks the daemon, and waits for its answer for at most `wait`, connecting included: if the daemon hangs,
/// connecting can hang as well. A slow daemon still carries out the request; its answer is not read.
fn ask(socket: &Path, request: Request, wait: Duration) -> Result<(), NotDone> {
    let (answer, answered) = mpsc::channel();
    let socket = socket.to_owned();
    thread::spawn(move || {
        // An answer that comes too late has no reader.
        let _ = answer.send(client::ask(&socket, request));
    });
    match answered.recv_timeout(wait) {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error @ ClientError::Refused(_))) => Err(NotDone::Refused(error.to_string())),
        Ok(Err(ClientError::Silent { .. })) | Err(_) => {
            Err(NotDone::Silent(format!("wideleafd did not answer within {wait:?}")))
        }
        Ok(Err(error)) => Err(NotDone::Unheard(error.to_string())),
    }
}
