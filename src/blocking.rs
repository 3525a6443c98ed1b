//! Work that may wait for a disk or a child process, kept off the runtime's thread.
//!
//! One place for all of it: in virtual time there are no other threads, since a paused clock takes a wait for one for
//! idleness and jumps. There the same work runs where it is awaited.

use tokio::task::JoinError;

/// Runs it, and waits for its end. Dropping the future does not stop work that has begun.
///
/// # Errors
/// It panicked, or the runtime ended before it had begun.
pub async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, JoinError> {
    #[cfg(feature = "fakehw")]
    if inline::is_asked_for() {
        return Ok(work());
    }
    tokio::task::spawn_blocking(work).await
}

/// As [`run`]; a panic of the work is the caller's.
pub async fn run_or_unwind<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    run(work).await.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}

/// Work runs on the thread that awaits it.
#[cfg(feature = "fakehw")]
pub mod inline {
    use std::cell::Cell;

    thread_local! {
        static ASKED: Cell<bool> = const { Cell::new(false) };
    }

    /// While it lives, for this thread.
    #[derive(Debug)]
    pub struct Inline(());

    impl Inline {
        /// From now on.
        pub fn here() -> Self {
            ASKED.set(true);
            Self(())
        }
    }

    impl Drop for Inline {
        fn drop(&mut self) {
            ASKED.set(false);
        }
    }

    pub(super) fn is_asked_for() -> bool {
        ASKED.get()
    }
}

#[cfg(all(test, feature = "fakehw"))]
mod tests {
    use std::thread::ThreadId;
    use std::time::Duration;

    use super::*;

    async fn thread() -> ThreadId {
        run(|| std::thread::current().id()).await.expect("it ends")
    }

    #[tokio::test(start_paused = true)]
    async fn work_runs_elsewhere_unless_it_is_asked_for_here_and_then_no_time_passes() {
        let own = std::thread::current().id();
        assert_ne!(thread().await, own);
        let before = tokio::time::Instant::now();
        let here = inline::Inline::here();
        let work = run(|| std::thread::sleep(Duration::from_millis(5)));
        tokio::time::timeout(Duration::from_millis(1), work)
            .await
            .expect("no time has passed")
            .expect("it ends");
        assert_eq!(thread().await, own);
        assert_eq!(before.elapsed(), Duration::ZERO);
        drop(here);
        assert_ne!(thread().await, own);
    }
}
