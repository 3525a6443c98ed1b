//! `bcd package-files`: what a package holds beside the program, made by the program, so that neither can be behind.

use std::path::{Path, PathBuf};

use clap::CommandFactory as _;
use clap_complete::Shell;

use super::{Cli, fail};
use crate::config;
use crate::model::Exit;

/// Write manual pages, shell completions and the sample of bcd.toml into a directory, for a package.
#[derive(Debug, clap::Args)]
#[command(hide = true)]
pub(super) struct Args {
    /// Made where it is missing.
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

#[derive(Debug, thiserror::Error)]
#[error("cannot write the package's files in {}", dir.display())]
struct WriteError {
    dir: PathBuf,
    source: std::io::Error,
}

pub(super) fn run(args: &Args) -> Result<Exit, Exit> {
    write(&args.dir)
        .map(|()| Exit::Done)
        .map_err(|source| fail(&WriteError { dir: args.dir.clone(), source }, Exit::CannotWrite))
}

fn write(dir: &Path) -> std::io::Result<()> {
    let man = dir.join("man");
    let completions = dir.join("completions");
    std::fs::create_dir_all(&man)?;
    std::fs::create_dir_all(&completions)?;
    clap_mangen::generate_to(Cli::command(), &man)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut Cli::command(), "bcd", &completions)?;
    }
    std::fs::write(man.join("bcd.toml.5"), config::manual())?;
    std::fs::write(dir.join("bcd.toml"), config::sample())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_subcommand_that_is_shown_has_a_page_and_the_hidden_ones_have_none() {
        let temp = tempfile::tempdir().unwrap();
        write(temp.path()).unwrap();
        for name in ["man/bcd.1", "man/bcd-node.1", "man/bcd-join.1", "man/bcd.toml.5", "bcd.toml"] {
            assert!(temp.path().join(name).exists(), "{name}");
        }
        assert!(!temp.path().join("man/bcd-package-files.1").exists());
        for name in ["bcd.bash", "_bcd", "bcd.fish"] {
            let text = std::fs::read_to_string(temp.path().join("completions").join(name)).unwrap();
            assert!(text.contains("journal"), "{name}");
        }
    }
}
