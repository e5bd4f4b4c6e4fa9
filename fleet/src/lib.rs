//! Tests of a fleet: the node agent, the daemon and the chart with a real API server, the real scheduler and Helm's
//! real client on one machine (`fleet/lab`, a program in Go that `fleet/build` builds). All of them are tests
//! (`tests/fleet`); `docs/fleet-lab.md` says what each command does and costs.
