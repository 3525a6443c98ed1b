//! A machine whose reboot is a new boot id in a file and the end of the daemon. Whoever started the daemon starts it
//! again, as the machine would. A build that fakes hardware never restarts the real one.

use std::io;
use std::path::{Path, PathBuf};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use tokio::sync::watch;

use crate::blocking;
use crate::clock;
use crate::model::BootId;
use crate::ports::{Reboot, RebootError};

/// Names the file of the fake machine's boot id for `bcd node`; absent: the machine cannot be rebooted.
pub const VARIABLE: &str = "BCD_FAKE_BOOT";

/// A machine in a file: one boot id a line, the last one is the present boot's.
#[derive(Debug, Clone)]
pub struct FakeMachine {
    file: PathBuf,
    /// Fixes the ids of its boots; absent: they are the system's chance.
    seed: Option<u64>,
}

impl FakeMachine {
    /// The machine of this file; one without a file is in the kernel's own boot.
    pub fn new(file: PathBuf) -> Self {
        Self { file, seed: None }
    }

    /// Has its boot ids come from a seed.
    #[must_use]
    pub fn with_seed(self, seed: u64) -> Self {
        Self { seed: Some(seed), ..self }
    }

    /// Its present boot.
    ///
    /// # Errors
    /// The file holds no id, or the kernel's cannot be read.
    pub fn boot_id(&self) -> io::Result<BootId> {
        match last_line(&self.file)? {
            Some(line) => BootId::new(line).map_err(io::Error::other),
            None => clock::boot_id(),
        }
    }

    /// How often it was rebooted.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn reboots(&self) -> io::Result<usize> {
        match std::fs::read_to_string(&self.file) {
            Ok(text) => Ok(text.lines().count()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
            Err(error) => Err(error),
        }
    }

    /// Begins a new boot. Blocks.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn begin_boot(&self) -> io::Result<()> {
        use std::io::Write as _;
        let boots = self.reboots()? as u64;
        let mut rng = self
            .seed
            .map_or_else(StdRng::from_os_rng, |seed| StdRng::seed_from_u64(seed.wrapping_add(boots)));
        let id = BootId::random(&mut rng);
        let mut file = std::fs::OpenOptions::new().append(true).create(true).open(&self.file)?;
        file.write_all(format!("{id}\n").as_bytes())
    }

    /// The port of a daemon that `stop` ends.
    pub fn port(&self, stop: watch::Sender<bool>) -> FakeReboot {
        FakeReboot { machine: Some(self.clone()), stop }
    }
}

fn last_line(file: &Path) -> io::Result<Option<String>> {
    match std::fs::read_to_string(file) {
        Ok(text) => Ok(text.lines().last().map(str::to_owned)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reboots a fake machine, or none.
#[derive(Debug)]
pub struct FakeReboot {
    machine: Option<FakeMachine>,
    stop: watch::Sender<bool>,
}

impl FakeReboot {
    /// For a daemon without a fake machine: every reboot is refused.
    pub fn none() -> Self {
        Self { machine: None, stop: watch::Sender::new(false) }
    }
}

impl Reboot for FakeReboot {
    fn reboot(&self) -> BoxFuture<'static, Result<(), RebootError>> {
        let (machine, stop) = (self.machine.clone(), self.stop.clone());
        async move {
            let Some(machine) = machine else {
                let text = format!("this build fakes hardware, and {VARIABLE} names no machine for it");
                return Err(RebootError::Refused(text));
            };
            let begun = blocking::run(move || machine.begin_boot()).await;
            let begun = begun.unwrap_or_else(|error| Err(io::Error::other(error)));
            begun.map_err(|error| RebootError::Refused(error.to_string()))?;
            stop.send_replace(true);
            Ok(())
        }
        .boxed()
    }
}
