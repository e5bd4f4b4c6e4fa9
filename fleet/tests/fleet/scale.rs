//! A fleet of 500 nodes and 5,000 guests: what one agent costs in it. Minutes: `make fleet-lab` runs it.

use std::time::Duration;

use wideleaf_testing::number_from_environment;

use crate::agent::Node;
use crate::faults::resident_kib;

/// Bar of the agent's memory, in KiB.
const MEMORY_MAX_KIB: u64 = 30 << 10;

/// CPU time of a process so far, in clock ticks of 10 ms (proc_pid_stat(5)).
fn cpu_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
#[ignore = "minutes; make fleet-lab"]
fn among_five_hundred_nodes_and_five_thousand_guests_an_agent_stays_small() {
    let count = |name, default: u64| number_from_environment(name).unwrap_or(default).to_string();
    let (nodes, guests) = (count("WIDELEAF_FLEET_NODES", 500), count("WIDELEAF_FLEET_GUESTS", 5000));
    let Some(node) = Node::start(&[], &["--count", &nodes, "--guests", &guests]) else { return };
    let pid = node.agent.as_ref().unwrap().0.id();
    // Its first lists are over.
    std::thread::sleep(Duration::from_secs(15));
    const MEASURED_S: u64 = 60;
    let (user, _) = node.account();
    let (from, before) = (node.server.audited(), cpu_ticks(pid));
    std::thread::sleep(Duration::from_secs(MEASURED_S));
    let (ticks, writes) = (cpu_ticks(pid) - before, node.server.writes_of(&user, from));
    let (agent, server) = (resident_kib(pid), resident_kib(node.server.pid()));
    println!("{nodes} nodes, {guests} guests, one agent for {MEASURED_S} s:");
    println!("  memory {agent} KiB, CPU {:.2} % of a core, {writes} writes", ticks as f64 / MEASURED_S as f64);
    println!("  API server with its store: {} MiB", server >> 10);
    assert!(agent <= MEMORY_MAX_KIB, "{agent} KiB");
}
