//! Options of the program, each also by environment.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use tracing_subscriber::filter::LevelFilter;
use wideleaf_control::protocol::SOCKET_PATH;

/// Publishes what wideleafd knows of this Kubernetes node: figures of the node, and the coverage of each VM.
///
/// It connects to wideleafd's control socket and to the API server. It has no other privilege on the node. When it
/// ends, everything stays as it is.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "wideleaf-node",
    version,
    after_help = "Examples:
  wideleaf-node --node worker-1                       in a pod, with its service account
  wideleaf-node --node worker-1 --kubeconfig FILE --once --log-level debug
  wideleaf-node --node worker-1 --hooks /var/run/kubevirt/plugins/wideleaf/hooks.sock --listen 127.0.0.1:9641
Signals: SIGTERM and SIGINT end it."
)]
pub struct Options {
    /// Name of this node's object
    #[arg(long, value_name = "NAME", env = "NODE_NAME", value_parser = node_name, required_unless_present = "forget")]
    pub node: Option<String>,
    /// wideleafd's control socket
    #[arg(long, value_name = "SOCKET", env = "WIDELEAF_NODE_DAEMON", default_value = SOCKET_PATH)]
    pub daemon: PathBuf,
    /// Unix socket to serve KubeVirt's node hooks on; without it no hook is served
    #[arg(long, value_name = "SOCKET", env = "WIDELEAF_NODE_HOOKS")]
    pub hooks: Option<PathBuf>,
    /// Address of the metrics and of /healthz; without it neither is served
    #[arg(long, value_name = "ADDRESS:PORT", env = "WIDELEAF_NODE_LISTEN")]
    pub listen: Option<SocketAddr>,
    /// Longest time from a change of a guest to its condition, in seconds, 1 to 300
    #[arg(long, value_name = "SECONDS", env = "WIDELEAF_NODE_INTERVAL", default_value = "5",
          value_parser = clap::value_parser!(u64).range(1..=300))]
    pub interval: u64,
    /// Publish once, print what was found, and end
    #[arg(long)]
    pub once: bool,
    /// Take back what agents have written on all nodes, pods and VMIs, once no agent is left, and end
    #[arg(long)]
    pub forget: bool,
    /// File that names the API server; without it KUBECONFIG, then the service account of the pod
    #[arg(long, value_name = "FILE", env = "WIDELEAF_NODE_KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,
    /// Least level of the log: error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL", env = "WIDELEAF_NODE_LOG_LEVEL", default_value = "info")]
    pub log_level: LevelFilter,
}

impl Options {
    /// Time between two rounds: a fifth of the interval is left for the round itself.
    pub fn period(&self) -> Duration {
        Duration::from_secs(self.interval) * 4 / 5
    }
}

/// A name of a node is a DNS subdomain (RFC 1123), and goes into selectors.
fn node_name(text: &str) -> Result<String, String> {
    let is_letter = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.');
    if text.is_empty() || text.len() > 253 || !text.bytes().all(is_letter) {
        return Err("a node's name has 1 to 253 lower-case letters, digits, hyphens and dots".into());
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str]) -> Result<Options, clap::Error> {
        Options::try_parse_from([&["wideleaf-node"], arguments].concat())
    }

    #[test]
    fn the_defaults_are_those_of_the_documentation() {
        let options = parse(&["--node", "n1"]).expect("valid");
        assert_eq!(options.daemon.to_str(), Some("/run/wideleaf/control.sock"));
        assert_eq!((options.interval, options.period(), options.once), (5, Duration::from_secs(4), false));
        assert_eq!((options.hooks, options.listen, options.log_level), (None, None, LevelFilter::INFO));
        assert!(!options.forget && parse(&["--forget"]).is_ok_and(|options| options.forget), "of all nodes");
    }

    #[test]
    fn the_chart_takes_the_same_intervals() {
        let schema = include_str!("../../../packaging/helm/wideleaf/values.schema.json");
        let schema: serde_json::Value = serde_json::from_str(schema).expect("JSON");
        let interval = &schema["properties"]["agent"]["properties"]["intervalSeconds"];
        for (name, next) in [("minimum", -1), ("maximum", 1)] {
            let bound = interval[name].as_i64().expect("a bound");
            for (seconds, is_valid) in [(bound, true), (bound + next, false)] {
                let parsed = parse(&["--node", "n1", &format!("--interval={seconds}")]);
                assert_eq!(parsed.is_ok(), is_valid, "{name}: {seconds}");
            }
        }
    }

    #[test]
    fn names_and_intervals_out_of_range_are_refused() {
        for arguments in [
            &["--node", ""][..],
            &["--node", "a,b"],
            &["--node", "N1"],
            &["--node", "n1", "--interval", "0"],
            &["--node", "n1", "--interval", "301"],
            &["--node", "n1", "--listen", "9641"],
            &["--node", "n1", "--log-level", "loud"],
        ] {
            assert!(parse(arguments).is_err(), "{arguments:?}");
        }
    }
}
