//! The command line: a file a subcommand. Nothing is decided here but which words are printed and which exit code is
//! returned; an error is printed once, through its sources.

mod bench;
mod config;
#[cfg(feature = "fakehw")]
mod ctl;
#[cfg(feature = "fakehw")]
mod gateway;
mod hold;
mod image;
mod join;
mod journal;
mod kinds;
mod leave;
mod node;
mod package_files;
#[cfg(feature = "fakehw")]
mod sim;
mod status;
#[cfg(feature = "fakehw")]
mod worker;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;

use clap::{Parser, Subcommand};

use crate::config::{Config, Flags};
use crate::model::Exit;

const VERSION: &str = if cfg!(feature = "fakehw") {
    concat!(env!("CARGO_PKG_VERSION"), " (simulation build)")
} else {
    env!("CARGO_PKG_VERSION")
};

/// The node agent: dials out to a gateway, takes commands, and loses none.
#[derive(Debug, Parser)]
#[command(name = "bcd", version = VERSION, disable_help_subcommand = true, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Join(join::Args),
    Node(node::Args),
    Leave(leave::Args),
    Image(image::Args),
    Status(status::Args),
    Hold(hold::HoldArgs),
    Release(hold::ReleaseArgs),
    Journal(journal::Args),
    Kinds(kinds::Args),
    Bench(bench::Args),
    Config(config::Args),
    PackageFiles(package_files::Args),
    /// The supervisor of one program; started by the daemon alone.
    #[command(hide = true)]
    Supervise,
    #[cfg(feature = "fakehw")]
    Gateway(gateway::Args),
    #[cfg(feature = "fakehw")]
    Worker(worker::Args),
    #[cfg(feature = "fakehw")]
    Ctl(ctl::Args),
    #[cfg(feature = "fakehw")]
    Sim(sim::Args),
    /// A share of the agents of `sim`; started by it alone.
    #[cfg(feature = "fakehw")]
    #[command(hide = true)]
    SimAgents,
}

/// Options that stand over bcd.toml.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Configuration")]
struct ConfigArgs {
    /// Configuration file; the default one, /etc/bcd/bcd.toml, may be missing.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// State directory: identity, keys and journal.
    #[arg(long, value_name = "DIR")]
    state: Option<String>,
    /// Run directory: the status socket.
    #[arg(long, value_name = "DIR")]
    run: Option<String>,
    /// error, warn, info, debug or trace.
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
    /// auto, journald, text or json.
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<String>,
}

impl ConfigArgs {
    fn load(&self) -> Result<Config, Exit> {
        let values = [
            ("paths.state", "--state", &self.state),
            ("paths.run", "--run", &self.run),
            ("log.level", "--log-level", &self.log_level),
            ("log.format", "--log-format", &self.log_format),
        ];
        let given = values.into_iter().filter_map(|(key, flag, value)| Some((key, flag, value.clone()?)));
        let flags = Flags { file: self.config.clone(), values: given.collect() };
        // A variable that is not UTF-8 is read with its damage, and refused where that matters.
        let environment =
            |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        Config::load(&flags, environment).map_err(|error| fail(&error, error.exit()))
    }

    /// The configuration, with the log started as it says and what is strange in it logged.
    fn load_and_log(&self) -> Result<Config, Exit> {
        let config = self.load()?;
        crate::log::start(config.log_level, config.log_format);
        for warning in config.warnings() {
            tracing::warn!("{warning}");
        }
        Ok(config)
    }
}

/// Runs the program with these arguments.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> Exit {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are no errors; clap prints them to standard output.
            let _ = error.print();
            return if error.use_stderr() { Exit::Usage } else { Exit::Done };
        }
    };
    let done = match cli.command {
        Command::Join(args) => join::run(&args),
        Command::Node(args) => node::run(&args),
        Command::Leave(args) => leave::run(&args),
        Command::Image(args) => image::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Hold(args) => hold::run(&args),
        Command::Release(args) => hold::release(&args),
        Command::Journal(args) => journal::run(&args),
        Command::Kinds(args) => kinds::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Config(args) => config::run(&args),
        Command::PackageFiles(args) => package_files::run(&args),
        Command::Supervise => Ok(crate::exec::supervise::main()),
        #[cfg(feature = "fakehw")]
        Command::Gateway(args) => Ok(gateway::run(args)),
        #[cfg(feature = "fakehw")]
        Command::Worker(args) => Ok(worker::run(args)),
        #[cfg(feature = "fakehw")]
        Command::Ctl(args) => Ok(ctl::run(args)),
        #[cfg(feature = "fakehw")]
        Command::Sim(args) => sim::run(&args),
        #[cfg(feature = "fakehw")]
        Command::SimAgents => sim::run_agents(),
    };
    done.unwrap_or_else(|exit| exit)
}

/// Says on standard error why the program ends.
fn fail(error: &dyn std::error::Error, exit: Exit) -> Exit {
    let mut text = format!("bcd: {error}");
    let mut source = error.source();
    while let Some(error) = source {
        let _ = write!(text, ": {error}");
        source = error.source();
    }
    note(&text);
    exit
}

/// A line on standard error; one that nobody reads is no failure.
fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Prints to standard output. A reader that has gone away has seen what it wanted.
fn print(text: &str) -> Result<(), Exit> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            note(&format!("bcd: cannot write to standard output: {error}"));
            Err(Exit::CannotWrite)
        }
        _ => Ok(()),
    }
}

/// Prints JSON, a line of its own.
fn print_json(value: &impl serde::Serialize) -> Result<(), Exit> {
    let text = serde_json::to_string_pretty(value).map_err(|error| fail(&error, Exit::Failed))?;
    print(&format!("{text}\n"))
}

/// A runtime of one thread: the daemon's work is waiting.
fn runtime() -> Result<tokio::runtime::Runtime, Exit> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| fail(&error, Exit::Failed))
}
