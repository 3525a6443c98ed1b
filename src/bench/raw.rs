//! The floor of a durable write: overwriting a file that has its blocks, and fdatasync. Nothing grows, so the file system
//! has no metadata to write.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use tokio::sync::oneshot;

/// As large as a journal's log.
const BYTES: u64 = 4 << 20;

/// A file that is overwritten from its beginning to its end, and again.
#[derive(Debug)]
pub(super) struct Raw {
    file: File,
    record: Vec<u8>,
    at: u64,
}

impl Raw {
    /// A new file of zeros, for records of so many bytes.
    pub(super) fn create(path: &Path, record: usize) -> io::Result<Self> {
        let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        let zeros = vec![0; 1 << 20];
        for at in (0..BYTES).step_by(zeros.len()) {
            file.write_all_at(&zeros, at)?;
        }
        file.sync_all()?;
        Ok(Self { file, record: vec![0x5a; record], at: 0 })
    }

    /// Overwrites the next `records` of them, and syncs once.
    pub(super) fn write(&mut self, records: usize) -> io::Result<()> {
        for _ in 0..records {
            let length = self.record.len() as u64;
            if self.at + length > BYTES {
                self.at = 0;
            }
            self.file.write_all_at(&self.record, self.at)?;
            self.at += length;
        }
        self.file.sync_data()
    }
}

#[derive(Debug, Default)]
struct Waiting {
    callers: Vec<oneshot::Sender<io::Result<()>>>,
    end: bool,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    wake: Condvar,
}

impl Queue {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Group commit at its barest: a thread that writes a record for each that waits, and syncs once for all of them.
#[derive(Debug)]
pub(super) struct RawGroup {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

impl RawGroup {
    /// Starts the thread.
    pub(super) fn start(mut raw: Raw) -> io::Result<Self> {
        let queue = Arc::new(Queue::default());
        let own = Arc::clone(&queue);
        let thread = std::thread::Builder::new().name("raw".into()).spawn(move || {
            loop {
                let mut waiting = own.waiting();
                while waiting.callers.is_empty() && !waiting.end {
                    waiting = own.wake.wait(waiting).unwrap_or_else(PoisonError::into_inner);
                }
                let callers = std::mem::take(&mut waiting.callers);
                drop(waiting);
                if callers.is_empty() {
                    return;
                }
                let written = raw.write(callers.len());
                for caller in callers {
                    let answer = written.as_ref().copied().map_err(|error| io::Error::from(error.kind()));
                    // Who does not wait any longer has its record all the same.
                    let _ = caller.send(answer);
                }
            }
        })?;
        Ok(Self { queue, thread: Some(thread) })
    }

    /// A handle for submitters.
    pub(super) fn submitter(&self) -> Submitter {
        Submitter(Arc::clone(&self.queue))
    }
}

impl Drop for RawGroup {
    fn drop(&mut self) {
        self.queue.waiting().end = true;
        self.queue.wake.notify_one();
        if let Some(thread) = self.thread.take() {
            // It has nothing to say but that it panicked, which it has printed.
            let _ = thread.join();
        }
    }
}

/// Submits records to a [`RawGroup`].
#[derive(Debug, Clone)]
pub(super) struct Submitter(Arc<Queue>);

impl Submitter {
    /// Writes a record; durable when this returns.
    pub(super) async fn write(&self) -> io::Result<()> {
        let (say, hear) = oneshot::channel();
        self.0.waiting().callers.push(say);
        self.0.wake.notify_one();
        hear.await.unwrap_or_else(|_| Err(io::Error::other("the thread of the raw writes is gone")))
    }
}
