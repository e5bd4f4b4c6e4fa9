//! The reason why a command ended without its result: one line, and an exit code.

use std::time::Duration;

use wideleaf_attach::find::FindError;
use wideleaf_attach::session::AttachError;
use wideleaf_control::client::ClientError;
use wideleaf_control::vm::VmClientError;
use wideleaf_vmm::config::ConfigError;

/// All kinds of failure, by exit code.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The guest reported a failure, or found its memory changed.
    #[error("{0}")]
    GuestFailed(String),
    /// Arguments that contradict each other.
    #[error("{0}")]
    Usage(String),
    /// The image, the initrd or the configuration cannot be used.
    #[error("{0}")]
    Input(String),
    /// The host lacks something that is required.
    #[error("{0}")]
    Host(String),
    /// The guest crashed while it ran.
    #[error("{0}")]
    GuestCrashed(String),
    /// The guest of a run did not end within the time of `--timeout`.
    #[error("the guest did not end within {0:?} (--timeout)")]
    TimedOut(Duration),
    /// Work that is part of a command did not end in time; its limit is no option.
    #[error("{0}")]
    TookTooLong(String),
    /// The result could not be written.
    #[error("{0}")]
    Output(String),
    /// libvirt's hook does not work.
    #[error(transparent)]
    Hook(#[from] HookFault),
    /// Ctrl-C, or a signal that asks to end.
    #[error("interrupted")]
    Interrupted,
}

/// Why libvirt's hook does not work. Each reason has its own exit code, from which a monitoring program sees the
/// remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HookFault {
    /// No hook of wideleaf is installed.
    #[error("the hook is not installed: run `wideleaf hook install`")]
    NotInstalled,
    /// The installed hook differs from the one that would be installed now.
    #[error("the hook is for another program or socket, or of another version: run `wideleaf hook install`")]
    OutOfDate,
    /// libvirtd started before the hook was installed.
    #[error("libvirtd does not run the hook yet: restart libvirtd once; running guests are not affected")]
    NotRun,
}

impl Failure {
    /// Exit code of a command that a signal ended.
    pub const INTERRUPTED: i32 = 130;

    /// Exit code as documented in the help text.
    pub const fn exit_code(&self) -> u8 {
        match self {
            Failure::GuestFailed(_) => 1,
            Failure::Usage(_) => 2,
            Failure::Input(_) => 3,
            Failure::Host(_) => 4,
            Failure::GuestCrashed(_) => 5,
            Failure::TimedOut(_) | Failure::TookTooLong(_) => 6,
            Failure::Output(_) => 7,
            Failure::Hook(HookFault::NotInstalled) => 10,
            Failure::Hook(HookFault::OutOfDate) => 11,
            Failure::Hook(HookFault::NotRun) => 12,
            Failure::Interrupted => Failure::INTERRUPTED as u8,
        }
    }

    /// The failure of `what` to end within a limit that no option sets.
    pub fn took_longer_than(limit: Duration, what: &str) -> Failure {
        Failure::TookTooLong(format!("{what} did not end within {limit:?}"))
    }

    /// The same failure, with the action during which it happened.
    pub fn during(self, what: &str) -> Failure {
        let say = |message: String| format!("{what}: {message}");
        match self {
            Failure::GuestFailed(message) => Failure::GuestFailed(say(message)),
            Failure::Usage(message) => Failure::Usage(say(message)),
            Failure::Input(message) => Failure::Input(say(message)),
            Failure::Host(message) => Failure::Host(say(message)),
            Failure::GuestCrashed(message) => Failure::GuestCrashed(say(message)),
            Failure::TookTooLong(message) => Failure::TookTooLong(say(message)),
            Failure::Output(message) => Failure::Output(say(message)),
            other @ (Failure::TimedOut(_) | Failure::Hook(_) | Failure::Interrupted) => other,
        }
    }

    /// Failure that corresponds to the exit code of a child.
    pub fn from_exit_code(code: i32, message: String) -> Failure {
        match code {
            1 => Failure::GuestFailed(message),
            2 => Failure::Usage(message),
            3 => Failure::Input(message),
            5 => Failure::GuestCrashed(message),
            6 => Failure::TookTooLong(message),
            7 => Failure::Output(message),
            Failure::INTERRUPTED => Failure::Interrupted,
            _ => Failure::Host(message),
        }
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Failure {
        match error {
            ConfigError::MoreThanHost { .. } => Failure::Host(error.to_string()),
            _ => Failure::Usage(error.to_string()),
        }
    }
}

impl From<FindError> for Failure {
    fn from(error: FindError) -> Failure {
        match error {
            FindError::Proc { .. } => Failure::Host(error.to_string()),
            _ => Failure::Usage(error.to_string()),
        }
    }
}

impl From<VmClientError> for Failure {
    fn from(error: VmClientError) -> Failure {
        match error {
            VmClientError::Refused(_) => Failure::Usage(error.to_string()),
            _ => Failure::Host(error.to_string()),
        }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Failure {
        match error {
            ClientError::Refused(_) => Failure::Usage(error.to_string()),
            _ => Failure::Host(error.to_string()),
        }
    }
}

impl From<AttachError> for Failure {
    fn from(error: AttachError) -> Failure {
        match error {
            AttachError::Policy(_) => Failure::Usage(error.to_string()),
            _ => Failure::Host(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_timeout_of_a_run_is_explained_by_its_option() {
        let limit = Duration::from_secs(60);
        let of_run = Failure::TimedOut(limit);
        let of_work = Failure::took_longer_than(limit, "the guest under QEMU").during("one job");
        assert_eq!((of_run.exit_code(), of_work.exit_code()), (6, 6));
        assert_eq!(of_run.to_string(), "the guest did not end within 60s (--timeout)");
        assert_eq!(of_work.to_string(), "one job: the guest under QEMU did not end within 60s");
    }
}
