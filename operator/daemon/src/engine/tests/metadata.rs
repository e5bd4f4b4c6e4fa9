//! Mistakes in the metadata of running domains.

use super::*;

fn started_with(pid: u32, domain: &str, mistakes: &[&str]) -> Request {
    let mistakes = mistakes.iter().map(|mistake| (*mistake).to_owned()).collect();
    let Request::Started { domain, uuid, pid, settings, .. } = started(pid, domain, None) else { unreachable!() };
    Request::Started { domain, uuid, pid, settings, mistakes }
}

#[test]
fn a_mistake_in_the_metadata_of_a_running_domain_is_in_its_view_also_after_a_restart() {
    let notes = |bench: &Bench| bench.list()[0].notes.clone();
    let bench = Bench::new("");
    bench.guests.start_domain(10, "web");
    bench.ask(started_with(10, "web", &["unknown attribute garantee"])).expect("it runs");
    let expected = ["a mistake in its metadata: unknown attribute garantee"];
    assert_eq!(notes(&bench), expected);
    bench.ask(Request::Detach { vm: "web".into() }).expect("it is managed");
    assert_eq!(notes(&bench), expected, "it is only observed");
    bench.attach(10).expect("it runs");
    let bench = bench.restarted();
    assert_eq!(notes(&bench), expected);
    bench.ask(started_with(10, "web", &[])).expect("libvirtd was restarted, and the metadata are right by now");
    assert_eq!(notes(&bench), [""; 0]);
}

#[test]
fn mistakes_are_forgotten_with_the_process() {
    let bench = Bench::new("");
    bench.guests.start_domain(10, "web");
    bench.ask(started_with(10, "web", &["unknown attribute garantee"])).expect("it runs");
    bench.guests.change(10, |guest| guest.has_ended = true);
    bench.scout();
    assert_eq!(bench.state().mistakes, []);
}
