//! What is done when libvirt calls its hook.
//!
//! libvirtd waits for a hook, and so does whoever waits for libvirtd: nothing here takes longer than `WAIT` but `prepare`,
//! which has to be over before QEMU maps its memory. Nothing is asked of libvirt, which would wait for us. Nothing is printed on
//! standard output. The one failure is a guest at `prepare` that asks for a guarantee nobody can give.

use std::fs;
use std::io::{self, Read};
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use wideleaf_control::client;
use wideleaf_control::protocol::Request;
use wideleaf_control::view::Guarantee;

use super::RunArgs;
use super::domain::Domain;
use super::xml::DOCUMENT_BYTES_MAX;
use crate::failure::Failure;
use crate::output::say;

/// How long an answer is waited for that changes nothing: long enough that the daemon's "no" is usually seen, short enough
/// for fifty guests that libvirtd finds again after its restart.
const WAIT: Duration = Duration::from_millis(300);
/// How long at `prepare`. The kernel moves memory to make pages; libvirt itself waits as long as it takes.
const PREPARE_WAIT: Duration = client::CHANGE_TIMEOUT;
/// Where libvirt writes a domain's process id, before `started`.
const PID_FILES: &str = "/run/libvirt/qemu";
/// What `<hugepages/>` without a size means, where the kernel does not say: its default on x86-64.
const DEFAULT_PAGE: u64 = 2 << 20;

/// Does what is to be done.
///
/// # Errors
/// [`Failure::Host`] at `prepare` where the domain asks for a guarantee that nobody can give.
pub fn main(args: &RunArgs) -> Result<(), Failure> {
    match args.operation.as_str() {
        "prepare" => prepare(args),
        "started" | "reconnect" => told(started(args)),
        "release" => told(release(args)),
        // The XML on standard input stays unread: libvirt does not mind.
        _ => Ok(()),
    }
}

/// What goes wrong after a guest has started is no reason to end it.
fn told(result: Result<(), String>) -> Result<(), Failure> {
    if let Err(why) = result {
        say(format_args!("wideleaf: hook: {why}"));
    }
    Ok(())
}

fn prepare(args: &RunArgs) -> Result<(), Failure> {
    let domain = match domain_on_stdin() {
        Ok(domain) => domain,
        Err(why) => return told(Err(why)),
    };
    let guarantee = domain.wishes.guarantee();
    let is_promised = !matches!(guarantee, Ok(Guarantee::BestEffort));
    let pages = if domain.wishes.may_grow_pool { domain.pages } else { Vec::new() };
    if pages.is_empty() && !is_promised {
        return Ok(());
    }
    let request = Request::Prepare { domain: args.name.clone(), uuid: domain.uuid, pages };
    let asked = guarantee.map_err(|error| error.to_string()).and_then(|_| ask(&args.socket, request, PREPARE_WAIT));
    match asked {
        Err(why) if is_promised => Err(Failure::Host(format!("{} asks for a guarantee: {why}", args.name))),
        other => told(other),
    }
}

/// Whether the guest is taken under management is for the daemon to say, which knows its configuration and who was detached.
fn started(args: &RunArgs) -> Result<(), String> {
    let domain = domain_on_stdin()?;
    let (uuid, settings, pid) = (domain.uuid, domain.wishes.settings, pid_of(&args.name)?);
    ask(&args.socket, Request::Started { domain: args.name.clone(), uuid, pid, settings }, WAIT)
}

fn release(args: &RunArgs) -> Result<(), String> {
    let uuid = domain_on_stdin()?.uuid;
    ask(&args.socket, Request::Release { domain: args.name.clone(), uuid }, WAIT)
}

/// Reads what libvirt gives us, and says what in it was not understood.
fn domain_on_stdin() -> Result<Domain, String> {
    let mut bytes = Vec::new();
    // One byte more than is read tells that there is more.
    let mut input = io::stdin().lock().take(DOCUMENT_BYTES_MAX as u64 + 1);
    input.read_to_end(&mut bytes).map_err(|error| format!("cannot read the domain's XML: {error}"))?;
    let text = String::from_utf8(bytes).map_err(|_| "the domain's XML is not UTF-8")?;
    let domain = Domain::parse(&text, default_page()).map_err(|error| format!("the domain's XML: {error}"))?;
    domain.wishes.odd.iter().for_each(|odd| say(format_args!("wideleaf: hook: {odd}")));
    Ok(domain)
}

/// The host's default huge page: what libvirt takes for `<hugepages/>`.
fn default_page() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = text.lines().find_map(|line| line.strip_prefix("Hugepagesize:")?.trim().strip_suffix(" kB"));
    kib.and_then(|kib| kib.trim().parse::<u64>().ok()).map_or(DEFAULT_PAGE, |kib| kib << 10)
}

fn pid_of(domain: &str) -> Result<u32, String> {
    let path = Path::new(PID_FILES).join(format!("{domain}.pid"));
    let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    text.trim().parse().map_err(|_| format!("{}: expected a process id, found {text:?}", path.display()))
}

/// Asks the daemon and waits for its answer no longer than `wait`, connecting included: where the daemon hangs, a connection can
/// hang as well. What a slow daemon has been asked by then it still does; nobody reads its answer.
fn ask(socket: &Path, request: Request, wait: Duration) -> Result<(), String> {
    let (answer, answered) = mpsc::channel();
    let socket = socket.to_owned();
    thread::spawn(move || answer.send(client::ask(&socket, request)));
    match answered.recv_timeout(wait) {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("wideleafd did not answer within {wait:?}")),
    }
}
