//! `bcd join`.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rand::SeedableRng as _;
use rand::rngs::StdRng;

use super::status::clock_difference;
use super::{ConfigArgs, fail, note, print};
use crate::clock::{self, Clock as _, SystemClock};
use crate::host::tcp::Tcp;
use crate::identity::join::{self, Joined, JournalOptions, Options, Retry};
use crate::identity::{self, Aside, Ticket, TicketError};
use crate::model::{Exit, Incarnation, limits};
use crate::wire::tls::BUILD_TIME;

/// Make this machine a node: with a ticket, once; or set it free of what it is.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// File with the join ticket, or - for standard input. Never the ticket itself: other users see arguments.
    #[arg(long, value_name = "FILE", required_unless_present = "reset")]
    ticket: Option<PathBuf>,
    /// First move the old identity and its journal aside, within the state directory; nothing is deleted. Without a
    /// ticket that is all.
    #[arg(long, requires = "yes")]
    reset: bool,
    /// The old identity is not wanted any more.
    #[arg(long, requires = "reset")]
    yes: bool,
    /// Keep trying until a gateway answers.
    #[arg(long, conflicts_with = "try_for")]
    wait: bool,
    /// Keep trying for so many seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    try_for: u64,
    #[command(flatten)]
    config: ConfigArgs,
}

#[derive(Debug, thiserror::Error)]
enum ReadError {
    #[error(
        "--ticket takes the file that holds the ticket, or - for standard input; a ticket on the command line can be read by every user of this machine and stays in the shell's history: ask for a new one"
    )]
    OnTheCommandLine,
    #[error(
        "cannot read the ticket {}; name the file that it was saved in with --ticket FILE, or hand it to standard input with --ticket -",
        .path.display()
    )]
    File { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Ticket(#[from] TicketError),
}

impl ReadError {
    fn exit(&self) -> Exit {
        match self {
            Self::OnTheCommandLine => Exit::Usage,
            Self::File { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied => {
                Exit::Permission
            }
            Self::File { .. } | Self::Ticket(_) => Exit::BadInput,
        }
    }
}

pub(super) fn run(args: &Args) -> Result<Exit, Exit> {
    let config = args.config.load_and_log()?;
    // Before anything is moved.
    let ticket = args.ticket.as_deref().map(read_ticket).transpose();
    let ticket = ticket.map_err(|error| fail(&error, error.exit()))?;
    // One that was killed behind its switch has a step to go, though its identity is there.
    if args.reset && !goes_on(&config.state, ticket.as_ref()) {
        if is_done(&config.state, ticket.as_ref()) {
            return Ok(Exit::Done);
        }
        let aside = identity::reset(&config.state);
        let aside = aside.map_err(|error| fail(&error, error.exit()))?;
        print(&moved(&aside))?;
    }
    let Some(ticket) = ticket else { return Ok(Exit::Done) };
    let boot_id = clock::boot_id().map_err(|error| fail(&error, Exit::Failed))?;
    let mut rng = StdRng::from_os_rng();
    let incarnation = Incarnation::random(&mut rng);
    let options = Options {
        state: config.state,
        ticket,
        patience: (!args.wait).then(|| Duration::from_secs(args.try_for)),
        journal: JournalOptions { incarnation, boot_id, wal_bytes: crate::node::WAL_BYTES },
        facts: facts(),
        machine: super::node::traces(),
        connect: Arc::new(Tcp),
        rng,
    };
    let joined = super::runtime()?.block_on(join::join(options, progress));
    let joined = joined.map_err(|error| fail(&error, error.exit()))?;
    print(&report(&joined))?;
    Ok(Exit::Done)
}

/// Whether a join with this ticket was killed here: after its reset, whose second run would throw away a use of the
/// ticket. A join that cannot be read is the reset's to move aside.
fn goes_on(state: &Path, ticket: Option<&Ticket>) -> bool {
    let pending = identity::pending_join(state).ok().flatten();
    let goes_on = ticket.is_some_and(|ticket| pending == Some(ticket.token.digest()));
    if goes_on {
        note("bcd: a join with this ticket has begun here; it goes on, and nothing is moved aside");
    }
    goes_on
}

/// Whether this machine is what the ticket has made of it: a second reset would leave it without identity, and the ticket,
/// which is for one machine, without a use. An identity that cannot be read is the reset's to move aside.
fn is_done(state: &Path, ticket: Option<&Ticket>) -> bool {
    let ticket = ticket.filter(|ticket| ticket.uses == Some(1));
    let joined =
        ticket.and_then(|ticket| identity::joined_with(state, &ticket.token.digest()).ok().flatten());
    if let Some(node_id) = &joined {
        note(&format!(
            "bcd: this machine has joined with this ticket already, as {node_id}, so nothing is moved aside; to make it \
             another node, ask for a new ticket"
        ));
    }
    joined.is_some()
}

/// What an operator reads of a reset.
pub(super) fn moved(aside: &Aside) -> String {
    let Some(node_id) = &aside.node_id else {
        return match aside.moved.len() {
            0 => "there was no identity to move aside\n".to_owned(),
            _ => format!("moved aside{}\n", listed(&aside.moved)),
        };
    };
    format!("this machine is {node_id} no more; moved aside{}\n", listed(&aside.moved))
}

fn listed(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| format!("\n  {}", path.display())).collect()
}

fn read_ticket(path: &Path) -> Result<Ticket, ReadError> {
    if path.to_string_lossy().starts_with("bcd1.") {
        return Err(ReadError::OnTheCommandLine);
    }
    let failed = |source| ReadError::File { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    let limit = limits::TICKET_BYTES as u64 + 1;
    if path.as_os_str() == "-" {
        std::io::stdin().take(limit).read_to_end(&mut bytes).map_err(failed)?;
    } else {
        let file = std::fs::File::open(path).map_err(failed)?;
        file.take(limit).read_to_end(&mut bytes).map_err(failed)?;
    }
    let text = String::from_utf8(bytes).map_err(|_| TicketError::NotATicket)?;
    Ok(Ticket::parse(&text, BUILD_TIME)?)
}

/// What the machine says of itself: for people at the control plane, who decide nothing by it.
fn facts() -> BTreeMap<String, String> {
    let mut facts = BTreeMap::from([
        ("bcd".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ("architecture".to_owned(), std::env::consts::ARCH.to_owned()),
    ]);
    if let Ok(name) = nix::unistd::gethostname() {
        facts.insert("hostname".into(), name.to_string_lossy().chars().take(255).collect());
    }
    if let Ok(release) = std::fs::read_to_string("/proc/sys/kernel/osrelease") {
        facts.insert("kernel".into(), release.trim().chars().take(255).collect());
    }
    facts
}

fn progress(retry: Retry<'_>) {
    let Retry { endpoint, end, wait } = retry;
    note(&format!("bcd: {endpoint}: {}; next attempt in {:.1} s", end.detail, wait.as_secs_f32()));
}

fn report(joined: &Joined) -> String {
    let Joined { node_id, generation, fingerprint, not_after, server_time } = joined;
    let difference = server_time.and_then(|time| clock_difference(time, SystemClock.wall_ms()));
    let difference = difference.map(|said| format!("clock     {said}\n")).unwrap_or_default();
    format!(
        "joined as {node_id} (identity generation {generation})\n\
         key       SHA-256 {fingerprint}\n\
         valid     until {not_after} by the control plane's clock\n\
         {difference}next      systemctl enable --now bcd, or in a terminal: bcd node\n"
    )
}
