//! Exit codes: one table for all subcommands (docs/errors.md shows it to users).

/// How a subcommand ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Done.
    Done,
    /// Failed, or a check failed.
    Failed,
    /// Warnings only.
    Warnings,
    /// Could not tell.
    Unknown,
    /// The command line is wrong.
    Usage,
    /// A bad ticket or other input.
    BadInput,
    /// No gateway was reached.
    NoGateway,
    /// Cannot write state.
    CannotWrite,
    /// Try later.
    TryLater,
    /// No permission.
    Permission,
    /// The configuration is wrong.
    Configuration,
    /// State of another node or of a newer release.
    ForeignState,
}

impl Exit {
    /// Every way to end, by code.
    pub const ALL: [Self; 12] = [
        Self::Done,
        Self::Failed,
        Self::Warnings,
        Self::Unknown,
        Self::Usage,
        Self::BadInput,
        Self::NoGateway,
        Self::CannotWrite,
        Self::TryLater,
        Self::Permission,
        Self::Configuration,
        Self::ForeignState,
    ];

    /// The process's exit code.
    pub fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Failed => 1,
            Self::Warnings => 2,
            Self::Unknown => 3,
            Self::Usage => 64,
            Self::BadInput => 65,
            Self::NoGateway => 69,
            Self::CannotWrite => 73,
            Self::TryLater => 75,
            Self::Permission => 77,
            Self::Configuration => 78,
            Self::ForeignState => 79,
        }
    }

    /// What the code means, for docs/errors.md.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Failed => "failed, or a check failed",
            Self::Warnings => "warnings only",
            Self::Unknown => "could not tell",
            Self::Usage => "the command line is wrong",
            Self::BadInput => "a bad ticket or other input",
            Self::NoGateway => "no gateway was reached",
            Self::CannotWrite => "cannot write state",
            Self::TryLater => "try later",
            Self::Permission => "no permission",
            Self::Configuration => "the configuration is wrong",
            Self::ForeignState => "state of another node or of a newer release",
        }
    }
}
