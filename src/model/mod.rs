//! The words: ids, times, kinds, command bodies, outcomes, reasons and limits.
//!
//! Everything here is pure: a function of its arguments, without clock, I/O or randomness. Every other module
//! may import it; it imports none.

pub mod command;
pub mod event;
pub mod exit;
pub mod ids;
pub mod kind;
pub mod limits;
pub mod machine;
pub mod outcome;
pub mod reason;
pub mod strict;
pub mod time;

pub use command::{Args, ArgsError, BarrierArgs, Command, CommandHeader, ExecArgs, ProbeArgs, RebootArgs};
pub use event::{Event, EventClass, EventType, NewEvent};
pub use exit::Exit;
pub use ids::{BarrierId, BootId, CommandId, Digest, Incarnation, JournalId, NodeId};
pub use kind::{Kind, Lane, RetrySafe, Role};
pub use machine::Machine;
pub use outcome::{Answer, AnswerState, Done, Effect, Outcome, Terminal};
pub use reason::Reason;
pub use time::ServerTime;
