//! The reference gateway: the other end of the wire, for tests, for `bcd sim`, and for somebody who tries bcd
//! without a control plane. It imports the words and the wire, never the agent, and shares no memory with one.

pub mod control;
