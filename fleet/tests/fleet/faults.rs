//! Faults of everything that the agent talks to. Minutes each: `make fleet-lab` runs them.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::json;
use wideleaf_testing::number_from_environment;

use crate::agent::{GUARANTEE, Guest, Node};
use crate::server::{MERGE, core, eventually, namespace};

/// Asks for a guarantee by an annotation, and waits until the agent's status has it.
fn a_guarantee_arrives(node: &Node, guest: &Guest, share: &str) {
    let patch = json!({"metadata": {"annotations": {GUARANTEE: share}}});
    node.server.admin().patch(&guest.vmi, MERGE, &patch).done();
    let began = Instant::now();
    eventually(&format!("the guest has the guarantee {share}"), || {
        node.managed().iter().any(|vm| vm.guarantee.to_string() == share).then_some(())
    });
    println!("the daemon has the guarantee {share} after {} ms", began.elapsed().as_millis());
}

fn is_covered(node: &Node, guest: &Guest) -> Option<()> {
    (guest.pod_condition(node)?["status"] == "True").then_some(())
}

/// A node with a guest that is covered; `None` if the test is to be skipped.
fn covered_guest() -> Option<(Node, Guest)> {
    let node = Node::start(&[], &[])?;
    let guest = Guest::start(&node, "db")?;
    eventually("it is covered", || is_covered(&node, &guest));
    Some((node, guest))
}

#[test]
#[ignore = "three minutes; make fleet-lab"]
fn an_api_server_that_was_gone_is_found_again_with_what_changed_meanwhile() {
    let Some((mut node, guest)) = covered_guest() else { return };
    let pid = node.agent.as_ref().unwrap().0.id();
    let memory = |pid: u32| resident_kib(pid);
    let before = memory(pid);
    node.server.kill();
    std::thread::sleep(Duration::from_secs(130));
    let while_gone = memory(pid);
    node.server.restart();
    a_guarantee_arrives(&node, &guest, "95%");
    assert!(node.agent.as_mut().unwrap().0.try_wait().unwrap().is_none(), "the agent lives on");
    println!("resident memory of the agent: {before} KiB before, {while_gone} KiB without a server");
    assert!(while_gone < before + (8 << 10), "it grows while the server is away");
}

#[test]
#[ignore = "a minute; make fleet-lab"]
fn a_watch_that_expired_is_replaced_by_a_list() {
    let Some((mut node, guest)) = covered_guest() else { return };
    node.agent.as_ref().unwrap().signal(Signal::SIGSTOP);
    let space = namespace(&node.server, "noise");
    for number in 0..200 {
        let map = json!({"metadata": {"name": format!("m{number}")}});
        node.server.admin().post(&core(&space, "configmaps"), &map).done();
    }
    let patch = json!({"metadata": {"annotations": {"wideleaf.io/policy": "off"}}});
    node.server.admin().patch(&guest.vmi, MERGE, &patch).done();
    node.server.kill();
    node.server.restart();
    node.server.compact();
    node.agent.as_ref().unwrap().signal(Signal::SIGCONT);
    a_guarantee_arrives(&node, &guest, "90%");
}

#[test]
#[ignore = "a minute; make fleet-lab"]
fn agents_and_daemons_that_are_killed_at_random_end_with_the_right_condition() {
    let rounds = number_from_environment("WIDELEAF_FLEET_ROUNDS").unwrap_or(8);
    let Some(mut node) = Node::start(&[], &[]) else { return };
    let Some(guest) = Guest::start(&node, "db") else { return };
    for round in 0..rounds {
        // Each at another moment of the other one's start and work.
        std::thread::sleep(Duration::from_millis(round * 331 % 2900));
        if round % 2 == 0 {
            let mut agent = node.agent.take().unwrap();
            agent.0.kill().unwrap();
            agent.0.wait().unwrap();
            node.start_agent(&[]);
        } else {
            let mut daemon = node.daemon.take().unwrap();
            daemon.0.kill().unwrap();
            daemon.0.wait().unwrap();
            node.start_daemon();
        }
    }
    eventually("it is covered", || is_covered(&node, &guest));
    a_guarantee_arrives(&node, &guest, "95%");
    let mut guest = guest;
    guest.qemu.check_all_words();
}

#[test]
#[ignore = "a minute; make fleet-lab"]
fn a_daemon_that_is_gone_makes_the_condition_unknown_and_its_return_is_an_event() {
    let Some((mut node, guest)) = covered_guest() else { return };
    drop(node.daemon.take());
    eventually("the pod says so", || {
        guest.pod_condition(&node).filter(|condition| condition["reason"] == "WideleafdSilent")
    });
    node.start_daemon();
    eventually("it is covered", || is_covered(&node, &guest));
    eventually("there is an event", || guest.has_event(&node, "HugePagesCovered").then_some(()));
}

/// Resident memory of a process, in KiB (proc_pid_status(5)).
pub fn resident_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}
