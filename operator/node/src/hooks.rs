//! KubeVirt's node hooks (VEP 190): virt-handler calls them over a Unix socket during the life of a VM.
//!
//! | hook point | what happens | a VM with `guaranteed` may fail |
//! |---|---|---|
//! | `PreVMStart`, `PreMigrationTarget` | its memory is compared with the host's, and none is set aside | yes |
//! | `PostVMStart`, `PostMigrationTarget` | wideleafd takes the guest, with its settings | no |
//! | `PreMigrationSource` | the guest is left alone until its migration is over | no |
//! | `PreVMStop`, `PostVMStop` | wideleafd forgets the start | no |
//!
//! A call that may fail the VM is answered before virt-handler's limit, whatever wideleafd does.
//! virt-handler waits for the others too, so they are answered within two seconds, and go on without it. It calls a
//! hook again after its own failures, so each call may come several times.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kube::core::DynamicObject;
use tokio::sync::Semaphore;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Code, Request, Response, Status};
use wideleaf_control::client::ClientError;
use wideleaf_control::protocol::{OrdinaryMemory, Request as Ask};
use wideleaf_control::socket_file::{SocketFile, SocketFileError};
use wideleaf_control::view::{Care, VmView, Vmm};

use crate::annotations::Requested;
use crate::cgroup;
use crate::counters::Counters;
use crate::daemon::{Daemon, is_for_now};
use crate::objects::VmiFacts;
use crate::rounds::{HOLD_S, Holds};
use crate::store::Store;

mod messages;

pub use messages::{EXECUTE_NODE_HOOK, ExecuteNodeHookRequest, ExecuteNodeHookResponse, NodeContext};
use messages::{NodeHookService, NodeHooks};

/// Limit of virt-handler where the plugin names none (KubeVirt, `DefaultTimeout`).
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);

/// Time that is left when a call is answered at the latest.
const MARGIN: Duration = Duration::from_secs(5);

/// Time within which a call that cannot fail the VM is answered.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// Interval between looks for a guest that has just started.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Number of calls at one time; further ones wait. Also the number of those that go on after their answer: further ones
/// are ignored.
const CALLS_MAX: usize = 16;

/// Carries out the hooks.
pub struct Hooks {
    daemon: Daemon,
    store: Arc<Store>,
    holds: Arc<Holds>,
    counters: Arc<Counters>,
    /// Room for calls that may go on after their answer.
    asides: Arc<Semaphore>,
}

/// Result of a call.
enum Outcome {
    /// What the hook is for has happened, or was not needed.
    Done,
    /// It has not happened, and the VM goes on.
    Ignored(String),
    /// The VM must not go on: it asks for what cannot be had.
    Refused(String),
}

impl Hooks {
    /// Hooks that talk to that daemon.
    pub fn new(daemon: Daemon, store: Arc<Store>, holds: Arc<Holds>, counters: Arc<Counters>) -> Hooks {
        Hooks { daemon, store, holds, counters, asides: Arc::new(Semaphore::new(CALLS_MAX)) }
    }

    /// Carries out one call, and answers within `limit` less a margin. A call that cannot fail the VM is answered soon,
    /// and may go on.
    ///
    /// # Errors
    /// A status for virt-handler, only for a VM that asks for `guaranteed`.
    pub async fn call(self: &Arc<Self>, point: &str, vmi: &[u8], limit: Duration) -> Result<(), Status> {
        let known = point_named(point);
        let parsed = serde_json::from_slice::<DynamicObject>(vmi).ok().and_then(|vmi| VmiFacts::of(&vmi));
        let Some(vmi) = parsed else {
            tracing::warn!("{point}: the VMI of the call cannot be read, and the VM goes on without it");
            self.counters.hook(known, "ignored");
            return Ok(());
        };
        let (requested, _) = Requested::of(Some(&vmi.annotations), None);
        let within = limit.saturating_sub(MARGIN).max(limit / 2);
        if can_refuse(known) && requested.prevents_start() {
            return self.carry_out(known, &vmi, &requested, within).await;
        }
        let Ok(room) = Arc::clone(&self.asides).try_acquire_owned() else {
            return self.ended(known, &vmi, Outcome::Ignored(format!("{CALLS_MAX} calls are under way")));
        };
        let hooks = Arc::clone(self);
        let aside = tokio::spawn(async move {
            // It has no result for the caller, which may have its answer already.
            let _ = hooks.carry_out(known, &vmi, &requested, within).await;
            drop(room);
        });
        let _ = tokio::time::timeout(ANSWER_WITHIN.min(within), aside).await;
        Ok(())
    }

    /// Carries out one call within that time.
    async fn carry_out(
        &self,
        point: &'static str,
        vmi: &VmiFacts,
        requested: &Requested,
        within: Duration,
    ) -> Result<(), Status> {
        let called = tokio::time::timeout(within, self.act(point, vmi, requested, within)).await;
        let late = format!("wideleafd gave no answer within {} s", within.as_secs());
        let outcome = called.unwrap_or_else(|_| refused_if(can_refuse(point) && requested.prevents_start(), late));
        self.store.wake();
        self.ended(point, vmi, outcome)
    }

    fn ended(&self, point: &'static str, vmi: &VmiFacts, outcome: Outcome) -> Result<(), Status> {
        let name = vmi.guest_name();
        match outcome {
            Outcome::Done => {
                self.counters.hook(point, "done");
                Ok(())
            }
            Outcome::Ignored(why) => {
                self.counters.hook(point, "ignored");
                tracing::warn!("{point} of {name}: {why}; the VM goes on");
                Ok(())
            }
            Outcome::Refused(why) => {
                self.counters.hook(point, "refused");
                tracing::warn!("{point} of {name} is refused: {why}");
                let remedy = "free memory on this node, or set the annotation wideleaf.io/huge-pages to bestEffort";
                Err(Status::new(Code::FailedPrecondition, format!("no huge pages for {name}: {why}; {remedy}")))
            }
        }
    }

    async fn act(&self, point: &str, vmi: &VmiFacts, requested: &Requested, within: Duration) -> Outcome {
        match point {
            "PreVMStart" | "PreMigrationTarget" => self.make_room(vmi, requested, within).await,
            "PostVMStart" | "PostMigrationTarget" => self.attach(vmi, requested, within).await,
            "PreMigrationSource" => self.hold_still(vmi, within).await,
            "PreVMStop" | "PostVMStop" if requested.prevents_start() => self.give_back(vmi, within).await,
            _ => Outcome::Done,
        }
    }

    /// Asks for room, for VMs that must not start without it. Pages of the kubelet's pools are the kubelet's.
    async fn make_room(&self, vmi: &VmiFacts, requested: &Requested, within: Duration) -> Outcome {
        let Some(share) = requested.guarantee.filter(|_| requested.prevents_start()).and_then(|of| of.share()) else {
            return Outcome::Done;
        };
        if vmi.has_pool_pages {
            return Outcome::Done;
        }
        let Some(bytes) = vmi.memory else {
            return Outcome::Ignored("the size of its memory is not in the VMI".into());
        };
        let large_bytes = (u128::from(bytes) * u128::from(share)).div_ceil(10_000) as u64;
        match self.daemon.view(within).await {
            Ok(view) => {
                if let Some(promotable) = view.promotable.filter(|promotable| promotable.compacted_2m < large_bytes) {
                    return Outcome::Refused(format!(
                        "{} have to be in huge pages, and {} can be, {} of it now",
                        crate::amounts::bytes(large_bytes),
                        crate::amounts::bytes(promotable.compacted_2m),
                        crate::amounts::bytes(promotable.now_2m)
                    ));
                }
            }
            Err(error) => return Outcome::Refused(error.to_string()),
        }
        let ordinary = Some(OrdinaryMemory { bytes, large_bytes });
        let (domain, uuid) = (vmi.guest_name(), vmi.identity.uid.clone());
        match self.daemon.ask(Ask::Prepare { domain, uuid, pages: Vec::new(), ordinary }, within).await {
            Ok(_) | Err(ClientError::Unsaved(_)) => Outcome::Done,
            Err(error) => Outcome::Refused(error.to_string()),
        }
    }

    async fn give_back(&self, vmi: &VmiFacts, within: Duration) -> Outcome {
        let (domain, uuid) = (vmi.guest_name(), vmi.identity.uid.clone());
        told(self.daemon.ask(Ask::Release { domain, uuid }, within).await)
    }

    /// Has the guest managed, with the settings of its annotations. A guest that is managed already keeps its other
    /// settings: its manager brings back what an arrival has split.
    async fn attach(&self, vmi: &VmiFacts, requested: &Requested, within: Duration) -> Outcome {
        let guest = match self.guest_of(vmi, within).await {
            Ok(guest) => guest,
            Err(why) => return Outcome::Ignored(why),
        };
        if guest.vmm == Vmm::Wideleaf || guest.care != Care::Unmanaged && !requested.is_any() {
            return Outcome::Done;
        }
        let until = Instant::now() + within;
        loop {
            match self.daemon.settle(&guest, requested.settings(&Requested::default()), within).await {
                Ok(()) => return Outcome::Done,
                Err(error) if is_later(&error, until) => tokio::time::sleep(LOOK_EVERY).await,
                Err(error) => return Outcome::Ignored(error.to_string()),
            }
        }
    }

    async fn hold_still(&self, vmi: &VmiFacts, within: Duration) -> Outcome {
        let guest = match self.guest_now(vmi, within).await {
            Ok(Some(guest)) => guest,
            Ok(None) => return Outcome::Ignored("wideleafd finds no guest of it".into()),
            Err(why) => return Outcome::Ignored(why),
        };
        if guest.care == Care::Unmanaged || guest.care == Care::Off {
            return Outcome::Done;
        }
        let until = Instant::now() + within;
        let asked = loop {
            match self.daemon.ask(Ask::LeaveAlone { vm: guest.pid.to_string(), for_s: HOLD_S }, within).await {
                Err(error) if is_later(&error, until) => tokio::time::sleep(LOOK_EVERY).await,
                asked => break asked,
            }
        };
        if matches!(asked, Ok(_) | Err(ClientError::Unsaved(_))) {
            self.holds.add(&vmi.identity.uid, guest.pid, Instant::now());
        }
        told(asked)
    }

    /// The guest of a VMI, which may have started a moment ago.
    async fn guest_of(&self, vmi: &VmiFacts, within: Duration) -> Result<VmView, String> {
        let until = Instant::now() + within.saturating_sub(LOOK_EVERY * 4).min(MARGIN * 2);
        loop {
            let found = self.guest_now(vmi, within).await;
            if let Ok(Some(guest)) = found {
                return Ok(guest);
            }
            if Instant::now() + LOOK_EVERY >= until {
                return Err(found.err().unwrap_or_else(|| "wideleafd finds no guest of it".into()));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    async fn guest_now(&self, vmi: &VmiFacts, within: Duration) -> Result<Option<VmView>, String> {
        let guests = self.daemon.guests(within).await.map_err(|error| error.to_string())?;
        // Its pods are known by their UIDs. Pods of other VMIs are no match, whatever their guests are called.
        let is_of_pod = |guest: &VmView| {
            let uid = guest.cgroup.as_deref().and_then(cgroup::pod_uid);
            uid.map(|uid| vmi.pods.contains(&uid))
        };
        let name = vmi.guest_name();
        let is_its_own = |guest: &&VmView| match is_of_pod(guest) {
            Some(is_its_own) if !vmi.pods.is_empty() => is_its_own,
            _ => guest.vmm == Vmm::Qemu && guest.name == name,
        };
        Ok(guests.iter().filter(is_its_own).max_by_key(|guest| guest.name == name).cloned())
    }
}

/// Whether wideleafd may carry out before `until` what it refuses now: it attaches the guest, or has just started.
fn is_later(error: &ClientError, until: Instant) -> bool {
    is_for_now(error) && Instant::now() + LOOK_EVERY < until
}

/// A call that is an error for a VM that asks for a guarantee, and a warning for others.
fn refused_if(is_refused: bool, why: String) -> Outcome {
    if is_refused { Outcome::Refused(why) } else { Outcome::Ignored(why) }
}

fn told<T>(asked: Result<T, ClientError>) -> Outcome {
    match asked {
        Ok(_) | Err(ClientError::Unsaved(_)) => Outcome::Done,
        Err(error) => Outcome::Ignored(error.to_string()),
    }
}

/// Whether a call of that hook may fail a VM.
fn can_refuse(point: &str) -> bool {
    matches!(point, "PreVMStart" | "PreMigrationTarget")
}

/// The known hook points have a name of their own in the metrics; others share one.
fn point_named(point: &str) -> &'static str {
    const POINTS: [&str; 7] = [
        "PreVMStart",
        "PostVMStart",
        "PreVMStop",
        "PostVMStop",
        "PreMigrationSource",
        "PreMigrationTarget",
        "PostMigrationTarget",
    ];
    POINTS.into_iter().find(|known| *known == point).unwrap_or("other")
}

/// Limit of the caller, from the header of gRPC (`29S`, `1500m`, …); the default without such a header.
fn limit_of(header: Option<&str>) -> Duration {
    let parsed = header.and_then(|text| {
        let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
        let number: u64 = number.parse().ok()?;
        Some(match unit {
            "H" => Duration::from_secs(number.checked_mul(3600)?),
            "M" => Duration::from_secs(number.checked_mul(60)?),
            "S" => Duration::from_secs(number),
            "m" => Duration::from_millis(number),
            "u" => Duration::from_micros(number),
            "n" => Duration::from_nanos(number),
            _ => return None,
        })
    });
    parsed.unwrap_or(TIMEOUT_DEFAULT)
}

impl NodeHooks for Hooks {
    fn execute(
        self: Arc<Self>,
        request: Request<ExecuteNodeHookRequest>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<ExecuteNodeHookResponse>, Status>> + Send>> {
        Box::pin(async move {
            let limit = limit_of(request.metadata().get("grpc-timeout").and_then(|text| text.to_str().ok()));
            let ExecuteNodeHookRequest { hook_point, vmi, .. } = request.into_inner();
            self.call(&hook_point, &vmi, limit).await.map(|()| Response::new(ExecuteNodeHookResponse {}))
        })
    }
}

/// Reason why the hooks are not served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The socket is not available.
    #[error(transparent)]
    Socket(#[from] SocketFileError),
    /// The kernel refused the socket.
    #[error("cannot serve hooks: {0}")]
    Io(#[from] std::io::Error),
    /// The server has failed.
    #[error("cannot serve hooks: {0}")]
    Server(#[from] tonic::transport::Error),
}

/// A socket that virt-handler can connect to. Its file is a sign that the plugin is ready, and is removed at the end.
pub struct HookSocket {
    listener: tokio::net::UnixListener,
    file: RemovedOnDrop,
}

struct RemovedOnDrop(PathBuf);

impl Drop for RemovedOnDrop {
    fn drop(&mut self) {
        // A file that another process has removed is as good.
        let _ = std::fs::remove_file(&self.0);
    }
}

impl HookSocket {
    /// Binds the socket, for root alone: virt-handler runs as root.
    ///
    /// # Errors
    /// [`ServeError`], one line that says what to do.
    pub fn bind(path: &Path) -> Result<HookSocket, ServeError> {
        let file = SocketFile {
            path,
            mode: 0o600,
            gid: None,
            makes_folder: true,
            owner: "another wideleaf-node",
            remedy: "name another socket with --hooks",
        };
        let listener = tokio::net::UnixListener::from_std(file.bind()?)?;
        Ok(HookSocket { listener, file: RemovedOnDrop(path.to_owned()) })
    }

    /// Serves hooks until `stop`; calls under way are answered first.
    ///
    /// # Errors
    /// [`ServeError`].
    pub async fn serve(self, hooks: Arc<Hooks>, stop: impl Future<Output = ()>) -> Result<(), ServeError> {
        let HookSocket { listener, file } = self;
        tracing::info!("hooks are served at {}", file.0.display());
        let server = tonic::transport::Server::builder().concurrency_limit_per_connection(CALLS_MAX);
        let calls = UnixListenerStream::new(listener);
        server.serve_with_incoming_shutdown(NodeHookService::new(hooks), calls, stop).await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
