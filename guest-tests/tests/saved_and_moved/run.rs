//! One `wideleaf run`, and where its guest is, as far as it can be told from outside.

use std::cell::RefCell;
use std::fs;
use std::io::Read as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use wideleaf_testing::scratch::Scratch;

/// Far more than anything here takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// State of a run's guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// It runs here.
    Here,
    /// It stands still, until an operator says whether it runs elsewhere.
    Doubt,
    /// Not to be told yet: the run begins, ends, or has a save or a migration under way.
    Busy,
    /// The run has ended.
    Gone(End),
}

/// How a run has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// This test killed it.
    Killed,
    /// Its guest was told to stop.
    Stopped,
    /// Its guest has moved elsewhere.
    Migrated,
    /// A guest that should have come has never run here.
    NeverCame,
    /// The guest came to its own end, and found all its words right.
    Finished,
}

/// A run, and its files in the folder: `N.sock`, `N.json`, `N.log`.
pub struct Run {
    pub number: u32,
    child: RefCell<Child>,
    end: RefCell<Option<End>>,
    folder: std::path::PathBuf,
    program: std::path::PathBuf,
}

impl Run {
    /// Starts `wideleaf run` with these arguments.
    pub fn start(scratch: &Scratch, number: u32, arguments: &[String]) -> Run {
        let folder = scratch.path(".");
        let log = fs::File::create(scratch.path(&format!("{number}.log"))).unwrap();
        let own = [
            "--policy=greedy".to_owned(),
            "--no-daemon".to_owned(),
            format!("--control-socket={number}.sock"),
            "--format=json".to_owned(),
            format!("--output={number}.json"),
        ];
        let mut command = Command::new(scratch.program());
        command.arg("run").args(arguments).args(own).current_dir(&folder).env("TMPDIR", &folder);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let (child, end) = (RefCell::new(child), RefCell::new(None));
        Run { number, child, end, folder, program: scratch.program() }
    }

    pub fn pid(&self) -> u32 {
        self.child.borrow().id()
    }

    /// Kills it outright, wherever it is.
    pub fn kill(&self) {
        if self.child.borrow_mut().try_wait().unwrap().is_none() {
            kill(Pid::from_raw(self.pid() as i32), Signal::SIGKILL).unwrap();
            self.child.borrow_mut().wait().unwrap();
        }
    }

    /// A client of its socket.
    pub fn client(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(["vm", &format!("{}.sock", self.number)]).args(arguments).current_dir(&self.folder);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Whether the client's command succeeded, and what it said.
    pub fn tell(&self, arguments: &[&str]) -> (bool, String) {
        said(self.client(arguments).spawn().unwrap())
    }

    fn status(&self) -> Option<Value> {
        let output = self.client(&["status", "--format=json"]).output().unwrap();
        output.status.success().then(|| serde_json::from_slice(&output.stdout).unwrap())
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.join(format!("{}.log", self.number))).unwrap()
    }

    /// The state now.
    pub fn state(&self) -> State {
        if let Some(end) = self.end() {
            return State::Gone(end);
        }
        let Some(status) = self.status() else { return State::Busy };
        let vcpus = status["vcpus"].as_array().unwrap();
        if status["doubt"].is_string() {
            State::Doubt
        } else if status["saving"].is_null() && vcpus.iter().all(|vcpu| vcpu == "running") {
            State::Here
        } else {
            State::Busy
        }
    }

    /// Its report, once it has ended.
    pub fn report(&self) -> Value {
        let text = fs::read(self.folder.join(format!("{}.json", self.number))).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    /// How it has ended, if it has.
    ///
    /// # Panics
    /// For an end that this test did not cause.
    pub fn end(&self) -> Option<End> {
        if let Some(end) = &*self.end.borrow() {
            return Some(end.clone());
        }
        let status = self.child.borrow_mut().try_wait().unwrap()?;
        let log = self.log();
        let end = match status.code() {
            None => End::Killed,
            Some(0) => match self.report()["outcome"].as_str().unwrap() {
                "migrated" => End::Migrated,
                "stopped" => End::Stopped,
                "success" => {
                    let report = self.report();
                    let verified = &report["verification"];
                    assert!(verified["passed"] == true && verified["errors"] == 0, "{report}");
                    End::Finished
                }
                other => panic!("run {} ended as {other}: {log}", self.number),
            },
            Some(4) if log.contains("it does not run here") => End::NeverCame,
            code => panic!(
                "run {} ended with {code:?}: {log}\n{:?}",
                self.number,
                fs::read_to_string(self.folder.join(format!("{}.json", self.number)))
            ),
        };
        *self.end.borrow_mut() = Some(end.clone());
        Some(end)
    }

    /// Waits for a state that lasts.
    pub fn settled(&self) -> State {
        wait_for(|| Some(self.state()).filter(|state| *state != State::Busy), &|| self.log())
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Whether it succeeded, and what it said.
pub fn said(mut client: Child) -> (bool, String) {
    let mut text = String::new();
    client.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    (client.wait().unwrap().success(), text)
}

/// Waits until there is something.
pub fn wait_for<T>(mut look: impl FnMut() -> Option<T>, why: &dyn Fn() -> String) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < PATIENCE, "it takes too long: {}", why());
        std::thread::sleep(Duration::from_millis(2));
    }
}
