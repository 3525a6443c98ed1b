//! Promises that a simulation build can be told to break, one at a time, so that a test can see its invariant fail: a
//! check that has never failed proves nothing. In a production build nothing is broken and `is` is a constant.
//!
//! `BCD_MUTANT=<name>` breaks one in a whole process and in those that it starts. A process has one mutant or none, so
//! that tests that share a process never meet one.

macro_rules! mutants {
    ($($(#[$doc:meta])* $name:ident = $text:literal;)+) => {
        /// A promise that is broken on purpose.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Mutant {
            $($(#[$doc])* $name,)+
        }

        impl Mutant {
            /// Every one.
            pub const ALL: &[Self] = &[$(Self::$name,)+];

            /// Its name in `BCD_MUTANT`.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)+
                }
            }
        }
    };
}

mutants! {
    /// The effect of a command is on its way before RUNNING and the begun record are durable.
    EffectBeforeSync = "effect-before-sync";
    /// A result is said once, and not again at the next Welcome or delivery.
    ResultNotResent = "result-not-resent";
    /// A delivery of a command that is known starts it again.
    DuplicateStarted = "duplicate-started-again";
    /// The ack of a result leaves nothing of its command.
    TombstoneForgotten = "tombstone-forgotten";
    /// The effect starts without a begun record.
    BegunSkipped = "begun-record-skipped";
    /// A node's next session has a lower epoch.
    EpochBack = "epoch-going-back";
    /// An ack of some events is taken for one of all.
    EventAckedTooFar = "event-acked-too-far";
    /// A command that its node refused for now has ended.
    BusyTerminal = "busy-taken-as-terminal";
    /// A result of a command that has ended ends it again.
    LateFactCounted = "late-fact-counted-twice";
    /// A command or a cancellation is carried out, whoever has signed it.
    SignatureUnchecked = "signature-not-checked";
    /// A signed body is taken, whomever it is for.
    WrongNodeTaken = "wrong-node-taken";
    /// A command is begun after its end.
    ExpiredTaken = "expired-taken";
    /// The machine's own clock says when a command has expired.
    WallClockDecides = "wall-clock-decides";
    /// A worker takes a result, whoever has signed it.
    ResultUnverified = "result-not-verified";
}

/// Whether this process breaks that promise.
#[cfg(not(feature = "fakehw"))]
pub const fn is(_mutant: Mutant) -> bool {
    false
}

#[cfg(feature = "fakehw")]
pub use chosen::{Unknown, chosen, is};

#[cfg(feature = "fakehw")]
mod chosen {
    use std::ffi::OsString;
    use std::sync::OnceLock;

    use super::Mutant;

    /// Whether this process breaks that promise.
    pub fn is(mutant: Mutant) -> bool {
        matches!(chosen(), Ok(Some(chosen)) if *chosen == mutant)
    }

    /// `BCD_MUTANT` names no mutant: a run under it would hold, and would look like one that should not have.
    #[derive(Debug, thiserror::Error)]
    #[error("BCD_MUTANT={0:?} names no mutant; there are: {names}", names = names())]
    pub struct Unknown(OsString);

    fn names() -> String {
        Mutant::ALL.iter().map(|mutant| mutant.name()).collect::<Vec<_>>().join(", ")
    }

    /// The mutant of this process.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn chosen() -> &'static Result<Option<Mutant>, Unknown> {
        static CHOSEN: OnceLock<Result<Option<Mutant>, Unknown>> = OnceLock::new();
        CHOSEN.get_or_init(|| {
            let Some(text) = std::env::var_os("BCD_MUTANT") else { return Ok(None) };
            let named = Mutant::ALL.iter().find(|mutant| text == mutant.name()).copied();
            named.map(Some).ok_or(Unknown(text))
        })
    }
}
