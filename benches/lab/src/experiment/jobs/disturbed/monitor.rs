//! QEMU's monitor, for the commands of an experiment (docs/interop/qmp-spec in QEMU's sources): one line of JSON each
//! way. Unlike the client of `wideleaf-attach`, it may change its guest, which belongs to the experiment.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use wideleaf_run::failure::Failure;

/// Time limit of each answer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(30);

/// A connection that is ready for commands.
#[derive(Debug)]
pub(in crate::experiment::jobs) struct Monitor(BufReader<UnixStream>);

impl Monitor {
    /// Connects to a socket on which QEMU listens.
    ///
    /// # Errors
    /// An error of the kernel, or a peer that does not speak QMP.
    pub(in crate::experiment::jobs) fn connect(socket: &Path) -> io::Result<Monitor> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(ANSWERS_WITHIN))?;
        stream.set_write_timeout(Some(ANSWERS_WITHIN))?;
        let mut monitor = Monitor(BufReader::new(stream));
        monitor.line()?;
        monitor.ask("qmp_capabilities", &json!({}))?.map_err(io::Error::other)?;
        Ok(monitor)
    }

    /// Sends a command and returns its result.
    ///
    /// # Errors
    /// [`Failure::Host`] with QEMU's reason.
    pub(in crate::experiment::jobs) fn command(&mut self, command: &str, arguments: &Value) -> Result<Value, Failure> {
        let answer = self.ask(command, arguments).map_err(|error| error.to_string()).and_then(|answer| answer);
        answer.map_err(|why| Failure::Host(format!("cannot do {command:?} in QEMU: {why}")))
    }

    /// The field `status` of the result of a query.
    ///
    /// # Errors
    /// Those of [`Monitor::command`].
    pub(in crate::experiment::jobs) fn status(&mut self, query: &str) -> Result<String, Failure> {
        Ok(self.command(query, &json!({}))?["status"].as_str().unwrap_or_default().to_owned())
    }

    fn ask(&mut self, command: &str, arguments: &Value) -> io::Result<Result<Value, String>> {
        let line = json!({ "execute": command, "arguments": arguments });
        writeln!(self.0.get_mut(), "{line}")?;
        loop {
            let mut answer = self.line()?;
            if let Some(error) = answer.get("error") {
                return Ok(Err(error["desc"].as_str().unwrap_or_default().to_owned()));
            }
            if answer.get("return").is_some() {
                return Ok(Ok(answer["return"].take()));
            }
            // An event.
        }
    }

    fn line(&mut self) -> io::Result<Value> {
        let mut line = String::new();
        match self.0.read_line(&mut line)? {
            0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "QEMU closed its monitor")),
            _ => serde_json::from_str(&line).map_err(io::Error::other),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    /// A monitor that greets, and answers each line with the next of these texts.
    fn answers(texts: &'static [&str]) -> (tempfile::TempDir, Monitor) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let socket = folder.path().join("qmp");
        let listener = UnixListener::bind(&socket).expect("the socket is new");
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client connects");
            writeln!(stream, "{{\"QMP\": {{}}}}").expect("it listens");
            let mut lines = BufReader::new(stream.try_clone().expect("a copy")).lines();
            for text in texts {
                if lines.next().is_none() || writeln!(stream, "{text}").is_err() {
                    return;
                }
            }
        });
        let monitor = Monitor::connect(&socket).expect("a monitor");
        (folder, monitor)
    }

    #[test]
    fn events_are_skipped_and_a_refusal_is_a_failure_in_qemus_words() {
        const TEXTS: &[&str] = &[
            "{\"return\": {}}",
            "{\"event\": \"STOP\"}\n{\"return\": {\"status\": \"active\"}}",
            "{\"error\": {\"class\": \"GenericError\", \"desc\": \"Postcopy is not supported\"}}",
        ];
        let (_folder, mut monitor) = answers(TEXTS);
        assert_eq!(monitor.status("query-migrate").expect("it answers"), "active");
        let refused = monitor.command("migrate", &json!({ "uri": "x" })).expect_err("it refuses").to_string();
        assert_eq!(refused, "cannot do \"migrate\" in QEMU: Postcopy is not supported");
        let closed = monitor.status("query-migrate").expect_err("it is gone").to_string();
        assert!(closed.starts_with("cannot do \"query-migrate\" in QEMU: "), "{closed}");
    }
}
