//! Restarts this machine: through systemd where it runs, so that services end in order, else through `reboot`.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;

use crate::ports::{Reboot, RebootError};

/// systemd answers once the job is queued.
const ANSWER: Duration = Duration::from_secs(30);
/// Present where systemd is the init (sd_booted(3)).
const SYSTEMD: &str = "/run/systemd/system";
/// More of a program's words than anybody reads, bytes.
const WORDS: usize = 400;

/// By a child process of this daemon; needs the privilege to reboot.
#[derive(Debug, Clone)]
pub struct SystemReboot {
    argv: Vec<String>,
}

impl SystemReboot {
    /// As this machine's init wants it.
    pub fn of_this_machine() -> Self {
        if Path::new(SYSTEMD).is_dir() {
            Self::by(&["/usr/bin/systemctl", "--no-ask-password", "reboot"])
        } else {
            Self::by(&["/sbin/reboot"])
        }
    }

    /// By this program and its arguments.
    pub fn by(argv: &[&str]) -> Self {
        Self { argv: argv.iter().map(|arg| (*arg).to_owned()).collect() }
    }
}

impl Reboot for SystemReboot {
    fn reboot(&self) -> BoxFuture<'static, Result<(), RebootError>> {
        let argv = self.argv.clone();
        async move {
            let name = argv.first().cloned().unwrap_or_default();
            let asked = tokio::task::spawn_blocking(move || ask(&argv));
            match tokio::time::timeout(ANSWER, asked).await {
                Ok(Ok(answer)) => answer,
                Ok(Err(error)) => Err(RebootError::Unanswered(format!("{name}: {error}"))),
                Err(_) => {
                    let text = format!("{name} did not answer within {} s", ANSWER.as_secs());
                    Err(RebootError::Unanswered(text))
                }
            }
        }
        .boxed()
    }
}

/// Blocks until the program has answered.
fn ask(argv: &[String]) -> Result<(), RebootError> {
    let (name, arguments) =
        argv.split_first().ok_or_else(|| RebootError::Refused("there is no program for it".into()))?;
    let output = Command::new(name).args(arguments).env_clear().stdin(Stdio::null()).output();
    let output = output.map_err(|error| RebootError::Refused(format!("cannot start {name}: {error}")))?;
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr);
    let words = words.trim();
    let words = &words[..words.floor_char_boundary(WORDS)];
    match output.status.code() {
        Some(_) => Err(RebootError::Refused(format!("{name} ended with {}: {words}", output.status))),
        // Somebody killed it, perhaps the shutdown that it had asked for.
        None => Err(RebootError::Unanswered(format!("{name} was ended by {}", output.status))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn by(argv: &[&str]) -> Result<(), RebootError> {
        SystemReboot::by(argv).reboot().await
    }

    #[tokio::test]
    async fn a_program_that_says_no_or_is_not_there_refuses_in_its_words() {
        let Err(RebootError::Refused(words)) = by(&["/bin/sh", "-c", "echo not today >&2; exit 1"]).await
        else {
            panic!("not refused");
        };
        assert!(words.contains("not today"), "{words}");
        assert!(matches!(by(&["/nowhere/reboot"]).await, Err(RebootError::Refused(_))));
    }

    #[tokio::test]
    async fn a_program_that_says_yes_was_heard_and_one_that_was_killed_may_have_been() {
        assert_eq!(by(&["/bin/true"]).await, Ok(()));
        let killed = by(&["/bin/sh", "-c", "kill -9 $$"]).await;
        assert!(matches!(killed, Err(RebootError::Unanswered(_))), "{killed:?}");
    }
}
