//! Faults on demand: what a disk does, in a test that has none to break. Empty in a production build.

/// Where a fault strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// An operation's statements.
    Statement,
    /// The commit, its sync included.
    Commit,
}

#[cfg(any(test, feature = "fakehw"))]
mod armed {
    use std::sync::{Arc, Mutex, PoisonError};

    use super::At;

    #[derive(Debug, Clone, Copy)]
    struct Fault {
        at: At,
        code: i32,
        skip: u32,
        times: u32,
    }

    /// A handle on the faults of one journal; its clones arm the same one.
    #[derive(Debug, Clone, Default)]
    pub struct Faults(Arc<Mutex<Option<Fault>>>);

    impl Faults {
        /// From now on every write at `at` fails with the extended SQLite code `code`, until it is cleared.
        pub fn fail(&self, at: At, code: i32) {
            self.fail_some(at, code, 0, u32::MAX);
        }

        /// Lets `skip` writes at `at` pass, then fails `times` of them.
        pub fn fail_some(&self, at: At, code: i32, skip: u32, times: u32) {
            *self.fault() = Some(Fault { at, code, skip, times });
        }

        /// The cause is gone.
        pub fn clear(&self) {
            *self.fault() = None;
        }

        fn fault(&self) -> std::sync::MutexGuard<'_, Option<Fault>> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }

        pub(in crate::journal) fn check(&self, at: At) -> rusqlite::Result<()> {
            let mut slot = self.fault();
            let Some(fault) = slot.as_mut().filter(|fault| fault.at == at) else { return Ok(()) };
            if fault.skip > 0 {
                fault.skip -= 1;
                return Ok(());
            }
            let code = fault.code;
            fault.times = fault.times.saturating_sub(1);
            if fault.times == 0 {
                *slot = None;
            }
            let error = rusqlite::ffi::Error::new(code);
            Err(rusqlite::Error::SqliteFailure(error, Some("a fault was asked for".into())))
        }
    }
}

#[cfg(not(any(test, feature = "fakehw")))]
mod armed {
    use super::At;

    /// No faults: this is a production build.
    #[derive(Debug, Clone, Default)]
    pub struct Faults(());

    impl Faults {
        pub(in crate::journal) fn check(&self, _at: At) -> rusqlite::Result<()> {
            Ok(())
        }
    }
}

pub use armed::Faults;
