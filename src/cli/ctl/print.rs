//! Prints what a gateway has answered.

use std::io::Write;

use data_encoding::BASE64;
use serde::Deserialize;

use super::CtlError;
use crate::gateway::control::{CommandView, EventView, NodeEventView, NodeView, Stats};
use crate::gateway::worker::FactView;
use crate::model::Exit;

/// The output of `node.exec`.
#[derive(Deserialize)]
struct ProgramOutput {
    stdout: StreamOutput,
    stderr: StreamOutput,
}

#[derive(Deserialize)]
struct StreamOutput {
    head: String,
    tail: String,
    size: u64,
    truncated: bool,
}

/// Both streams of a program, each to its own; an output that is none is not shown.
pub(super) fn program_output(output: &str) -> Result<(), CtlError> {
    let Ok(output) = serde_json::from_str::<ProgramOutput>(output) else { return Ok(()) };
    print_stream("standard output", &output.stdout, &mut std::io::stdout())?;
    print_stream("standard error", &output.stderr, &mut std::io::stderr())
}

fn print_stream(name: &str, stream: &StreamOutput, out: &mut impl Write) -> Result<(), CtlError> {
    let decode = |text: &str| BASE64.decode(text.as_bytes()).unwrap_or_default();
    let (head, tail) = (decode(&stream.head), decode(&stream.tail));
    out.write_all(&head)?;
    out.write_all(&tail)?;
    out.flush()?;
    if stream.truncated {
        eprintln!(
            "bcd ctl: {name} was cut: its first {} and last {} of {} bytes are shown",
            head.len(),
            tail.len(),
            stream.size
        );
    }
    Ok(())
}

/// The exit code of an ended command; what is wrong goes to standard error.
pub(super) fn end(view: &CommandView) -> Exit {
    if view.state == "succeeded" {
        return Exit::Done;
    }
    let mut text = format!("bcd ctl: {} {}", view.id, view.state);
    for part in [&view.reason, &view.message].into_iter().filter(|part| !part.is_empty()) {
        text.push_str(": ");
        text.push_str(part);
    }
    eprintln!("{text} (effect {})", if view.effect.is_empty() { "unknown" } else { &view.effect });
    Exit::Failed
}

pub(super) fn list(commands: &[CommandView]) -> Result<(), CtlError> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{:<34}  {:<12}  {:<10}  {:<34}  REASON", "COMMAND", "KIND", "STATE", "NODE")?;
    for view in commands {
        let CommandView { id, kind, state, node, reason, .. } = view;
        writeln!(out, "{:<34}  {kind:<12}  {state:<10}  {:<34}  {reason}", id.as_str(), node.as_str())?;
    }
    Ok(())
}

pub(super) fn nodes(nodes: &[NodeView]) -> Result<(), CtlError> {
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{:<34}  {:<12}  {:>6}  {:<8}  {:<10}  {:<18}  {:<14}  LABELS",
        "NODE", "STATE", "EPOCH", "SITE", "VERSION", "GATEWAY", "LAST SEEN"
    )?;
    for view in nodes {
        let NodeView { state, epoch, site, version, gateway, labels, .. } = view;
        let labels: Vec<_> = labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let labels = labels.join(",");
        let seen = if *epoch == 0 { "never".into() } else { format!("{} ms ago", view.last_seen_age_ms) };
        writeln!(
            out,
            "{:<34}  {state:<12}  {epoch:>6}  {site:<8}  {version:<10}  {gateway:<18}  {seen:<14}  {labels}",
            view.node.as_str()
        )?;
    }
    Ok(())
}

pub(super) fn event(event: &EventView) -> Result<(), CtlError> {
    let at = crate::model::ServerTime(event.at_ms);
    Ok(writeln!(
        std::io::stdout(),
        "{:>6}  {at}  {}  {}  {}",
        event.seq,
        event.kind,
        event.node,
        event.detail
    )?)
}

pub(super) fn node_event(event: &NodeEventView) -> Result<(), CtlError> {
    let mut out = std::io::stdout().lock();
    if let Some((from, to)) = event.dropped {
        writeln!(out, "{:>6}  {} events were dropped", "", to - from + 1)?;
    }
    let at = crate::model::ServerTime(event.at_ms);
    Ok(writeln!(out, "{:>6}  {at}  {}  {}  {}", event.seq, event.class, event.kind, event.body)?)
}

pub(super) fn results(facts: &[FactView]) -> Result<(), CtlError> {
    let mut out = std::io::stdout().lock();
    for fact in facts {
        let at = crate::model::ServerTime(fact.at_ms);
        let FactView { command, node, state, refused, detail, .. } = fact;
        match refused.is_empty() {
            true => writeln!(out, "{at}  {command}  {node}  {state}  verified")?,
            false => writeln!(out, "{at}  {command}  {node}  {state}  refused {refused}: {detail}")?,
        }
    }
    Ok(())
}

pub(super) fn stats(stats: &Stats) -> Result<(), CtlError> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "sessions  {}\nnodes     {}\nhellos    {}", stats.sessions, stats.nodes, stats.hellos)?;
    for (gateway, count) in &stats.gateways {
        writeln!(out, "sessions  {gateway} {count}")?;
    }
    for (state, count) in &stats.commands {
        writeln!(out, "commands  {state} {count}")?;
    }
    for (token, count) in &stats.refused {
        writeln!(out, "refused   {token} {count}")?;
    }
    Ok(())
}
