//! What the daemon and a supervisor say to each other, each once and in one line, over the socket that is the
//! supervisor's standard input: environment and input of a program are secrets, so no argument list and no file carries
//! them.

use std::io::{self, BufRead as _, BufReader, Read, Write};
use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::exec::mark::Mark;
use crate::journal::begun::{Record, Supervisor};
use crate::model::limits::COMMAND_BODY_BYTES;
use crate::model::{BootId, ExecArgs};

/// Longest message: the arguments of a command, each character escaped at worst, and a record beside them.
const MESSAGE_BYTES: u64 = 6 * COMMAND_BODY_BYTES as u64 + (64 << 10);

/// What a supervisor is to do. It is printed nowhere.
#[derive(Clone, Serialize, Deserialize)]
pub struct Job {
    /// The state directory.
    pub state: PathBuf,
    /// The boot, by the daemon's word.
    pub boot_id: BootId,
    /// The record that is to be made first; it does not name its supervisor yet.
    pub begun: Record,
    /// The program.
    pub args: ExecArgs,
}

impl Job {
    /// What the program and all that it starts carry in their environment.
    pub(in crate::exec) fn mark(&self) -> Mark {
        Mark::of(&self.begun)
    }
}

/// What a supervisor answers before it starts anything.
#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    /// The record is durable; the program is started next.
    Durable(Supervisor),
    /// There is a record already: nothing was started.
    Exists,
    /// The record could not be made: nothing was started.
    Failed {
        /// What did not work.
        detail: String,
        /// The kernel's word about a file that could not be written, where that was it.
        errno: Option<i32>,
    },
}

/// Sends one message.
pub fn send(mut to: impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut text = serde_json::to_vec(message)?;
    text.push(b'\n');
    to.write_all(&text)
}

/// Receives one message. Whoever else holds the sender's end open does not matter.
pub fn receive<T: DeserializeOwned>(from: impl Read) -> io::Result<T> {
    let mut text = Vec::new();
    BufReader::new(from.take(MESSAGE_BYTES)).read_until(b'\n', &mut text)?;
    Ok(serde_json::from_slice(&text)?)
}
