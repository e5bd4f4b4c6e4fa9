//! Parses the command line, runs, prints one line after a failure and sets the exit code. Everything else is in the
//! library.

use std::future::pending;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser as _;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch as flag;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use wideleaf_node::counters::Counters;
use wideleaf_node::daemon::Daemon;
use wideleaf_node::forget::{Forgotten, forget};
use wideleaf_node::health::{self, Pages};
use wideleaf_node::hooks::{HookSocket, Hooks};
use wideleaf_node::options::Options;
use wideleaf_node::publish::Publisher;
use wideleaf_node::rounds::{Holds, Rounds, SharedHealth, Summary};
use wideleaf_node::store::Store;
use wideleaf_node::watch;

/// Exit codes as of `wideleaf`: an invalid configuration, a host that lacks something.
const EXIT_INPUT: u8 = 3;
const EXIT_HOST: u8 = 4;

/// Time that `--once` waits for the lists of pods and VMIs.
const LISTS_WITHIN: Duration = Duration::from_secs(30);

/// Interval between looks whether the lists are there.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Time for hooks under way to be answered at the end, less than a pod's grace period.
const END_WITHIN: Duration = Duration::from_secs(5);

/// Reason for a failure, and its exit code.
struct Failure(u8, String);

fn main() -> ExitCode {
    let options = Options::parse();
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).without_time();
    let lines = lines.with_target(false).with_ansi(false).log_internal_errors(false);
    // The client logs each failed call, and the agent says once what is wrong.
    let of_client = if options.log_level >= LevelFilter::DEBUG { options.log_level } else { LevelFilter::OFF };
    let levels = Targets::new().with_default(options.log_level).with_target("kube_client", of_client);
    tracing_subscriber::registry().with(levels).with(lines).init();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let ended = match runtime {
        Ok(runtime) => {
            let ended = runtime.block_on(run(options));
            // A look-up of a name that hangs has a thread, which ends with this process.
            runtime.shutdown_background();
            ended
        }
        Err(error) => Err(Failure(EXIT_HOST, format!("cannot start: {error}"))),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure(code, line)) => {
            eprintln!("wideleaf-node: {line}");
            ExitCode::from(code)
        }
    }
}

async fn run(options: Options) -> Result<(), Failure> {
    let host = |error: &dyn std::error::Error| Failure(EXIT_HOST, error.to_string());
    // Before anything that has to be undone at the end.
    let mut signals = Signals::new().map_err(|error| host(&error))?;
    let client = client(options.kubeconfig.as_deref()).await.map_err(|line| Failure(EXIT_INPUT, line))?;
    let Some(node) = options.node.clone().filter(|_| !options.forget) else {
        let Forgotten { nodes, pods, vmis } = forget(&client).await.map_err(|line| Failure(EXIT_HOST, line))?;
        println!("took back what agents had written on {nodes} nodes, {pods} pods and {vmis} VMIs");
        return Ok(());
    };
    let (store, holds) = (Arc::new(Store::default()), Arc::new(Holds::default()));
    let (counters, health) = (Arc::new(Counters::default()), SharedHealth::default());
    let daemon = Daemon::at(&options.daemon);
    let publisher = Publisher::new(client.clone(), &node, Arc::clone(&counters));
    let hooks = Hooks::new(daemon.clone(), Arc::clone(&store), Arc::clone(&holds), Arc::clone(&counters));
    let mut rounds =
        Rounds::new(&node, daemon, Arc::clone(&store), holds, Arc::clone(&counters), Arc::clone(&health), publisher);
    let watch_pods = watch::pods(client.clone(), node.clone(), Arc::clone(&store), Arc::clone(&counters));
    let watch_vmis = watch::vmis(client, node.clone(), Arc::clone(&store), Arc::clone(&counters));
    let (pods, vmis) = (tokio::spawn(watch_pods), tokio::spawn(watch_vmis));
    if options.once {
        let done = once(&node, &store, &mut rounds).await;
        pods.abort();
        vmis.abort();
        return done;
    }
    let socket = options.hooks.as_deref().map(HookSocket::bind).transpose().map_err(|error| host(&error))?;
    let (stop, mut stopped) = flag::channel(false);
    let served = async {
        let Some(socket) = socket else { return pending().await };
        let until = async move { drop(stopped.wait_for(|stop| *stop).await) };
        socket.serve(Arc::new(hooks), until).await
    };
    let pages = async {
        let Some(address) = options.listen else { return pending().await };
        health::serve(address, Pages::new(health, counters, options.period())).await
    };
    tracing::info!("wideleaf-node {} publishes node {}", env!("CARGO_PKG_VERSION"), node);
    let mut served = std::pin::pin!(served);
    let ended = tokio::select! {
        result = &mut served => result.map_err(|error| host(&error)),
        Err(error) = pages => Err(Failure(EXIT_HOST, format!("cannot serve metrics: {error}; change --listen"))),
        () = rounds.run(options.period()) => Ok(()),
        () = signals.received() => Ok(()),
        _ = pods => Err(Failure(EXIT_HOST, "cannot follow the pods: their watch has ended".into())),
        _ = vmis => Err(Failure(EXIT_HOST, "cannot follow the VMIs: their watch has ended".into())),
    };
    if ended.is_ok() && options.hooks.is_some() {
        // Calls under way are answered first.
        let _ = stop.send(true);
        let _ = tokio::time::timeout(END_WITHIN, served).await;
    }
    tracing::info!("wideleaf-node has ended; what it has published stays");
    ended
}

/// SIGTERM and SIGINT.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Signals> {
        Ok(Signals { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Returns when one of them was received.
    async fn received(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

async fn client(kubeconfig: Option<&Path>) -> Result<Client, String> {
    let config = match kubeconfig {
        Some(path) => {
            let named =
                |why: String| format!("cannot use {}: {why}; name another file with --kubeconfig", path.display());
            let file = Kubeconfig::read_from(path).map_err(|error| named(error.to_string()))?;
            let options = KubeConfigOptions::default();
            Config::from_custom_kubeconfig(file, &options).await.map_err(|error| named(error.to_string()))?
        }
        None => Config::infer().await.map_err(|error| {
            let why = error.to_string().replace('\n', " ");
            format!("cannot find the API server: {why}; run in a pod with a service account, or name a --kubeconfig")
        })?,
    };
    Client::try_from(config).map_err(|error| format!("cannot connect to the API server: {error}"))
}

async fn once(node: &str, store: &Store, rounds: &mut Rounds) -> Result<(), Failure> {
    let listed = async {
        while !store.objects().are_known() {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    tokio::time::timeout(LISTS_WITHIN, listed).await.map_err(|_| {
        let within = LISTS_WITHIN.as_secs();
        let line = format!(
            "cannot publish: the API server has not listed the node's pods within {within} s; see the log above"
        );
        Failure(EXIT_HOST, line)
    })?;
    let Summary { guests, placed, covered } = rounds.once().await.map_err(|line| Failure(EXIT_HOST, line))?;
    println!("node {node}: {guests} guests, {placed} of them in pods of this node, {covered} covered");
    Ok(())
}
