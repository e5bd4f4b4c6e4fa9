//! Why a command ended without its result: one line, and the exit code it stands for.

/// Every way to fail, by exit code.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The guest said that it failed, or that its memory is not what it wrote.
    #[error("{0}")]
    GuestFailed(String),
    /// Arguments that contradict each other.
    #[error("{0}")]
    Usage(String),
    /// The image, the initrd or the configuration can not be used.
    #[error("{0}")]
    Input(String),
    /// The host lacks something.
    #[error("{0}")]
    Host(String),
    /// The guest crashed.
    #[error("{0}")]
    GuestCrashed(String),
    /// The guest did not end in time.
    #[error("the guest did not end within {0:?} (--timeout)")]
    TimedOut(std::time::Duration),
    /// The result could not be written.
    #[error("{0}")]
    Output(String),
    /// libvirt's hook does not work.
    #[error(transparent)]
    Hook(#[from] HookFault),
    /// Ctrl-C or a polite kill.
    #[error("interrupted")]
    Interrupted,
}

/// Why libvirt's hook does not work, each with an exit code of its own: who watches it tells by that what is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HookFault {
    /// There is none of ours that libvirt could run.
    #[error("the hook is not installed: run `wideleaf hook install`")]
    NotInstalled,
    /// It is not what would be installed now.
    #[error("the hook is for another program or socket, or of another version: run `wideleaf hook install`")]
    OutOfDate,
    /// libvirtd started before there was one.
    #[error("libvirtd does not run the hook yet: restart libvirtd once, running guests live on")]
    NotRun,
}

impl Failure {
    /// The exit code of what a signal ended.
    pub const INTERRUPTED: i32 = 130;

    /// The documented exit code.
    pub const fn exit_code(&self) -> u8 {
        match self {
            Failure::GuestFailed(_) => 1,
            Failure::Usage(_) => 2,
            Failure::Input(_) => 3,
            Failure::Host(_) => 4,
            Failure::GuestCrashed(_) => 5,
            Failure::TimedOut(_) => 6,
            Failure::Output(_) => 7,
            Failure::Hook(HookFault::NotInstalled) => 10,
            Failure::Hook(HookFault::OutOfDate) => 11,
            Failure::Hook(HookFault::NotRun) => 12,
            Failure::Interrupted => Failure::INTERRUPTED as u8,
        }
    }

    /// The same failure, saying what was being done.
    pub fn during(self, what: &str) -> Failure {
        let say = |message: String| format!("{what}: {message}");
        match self {
            Failure::GuestFailed(message) => Failure::GuestFailed(say(message)),
            Failure::Usage(message) => Failure::Usage(say(message)),
            Failure::Input(message) => Failure::Input(say(message)),
            Failure::Host(message) => Failure::Host(say(message)),
            Failure::GuestCrashed(message) => Failure::GuestCrashed(say(message)),
            Failure::Output(message) => Failure::Output(say(message)),
            other @ (Failure::TimedOut(_) | Failure::Hook(_) | Failure::Interrupted) => other,
        }
    }

    /// The failure that an exit code of a child stands for.
    pub fn from_exit_code(code: i32, message: String) -> Failure {
        match code {
            1 => Failure::GuestFailed(message),
            2 => Failure::Usage(message),
            3 => Failure::Input(message),
            5 => Failure::GuestCrashed(message),
            7 => Failure::Output(message),
            Failure::INTERRUPTED => Failure::Interrupted,
            _ => Failure::Host(message),
        }
    }
}
