//! The states of a command at the gateway.

/// Where a command stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Waits for a credit, for its node, or for the end of a back-off.
    Pending,
    /// Marked for a session; the node has not said that it knows it. Replayed at each Hello.
    Dispatched,
    /// The node knows it durably.
    Accepted,
    /// The node has started it.
    Running,
    /// Ended as asked.
    Succeeded,
    /// Ended otherwise.
    Failed,
    /// Cancelled.
    Cancelled,
    /// The node will never run it.
    Rejected,
    /// not_after passed before the node said that it knows it.
    Expired,
}

impl State {
    const ALL: [Self; 9] = [
        Self::Pending,
        Self::Dispatched,
        Self::Accepted,
        Self::Running,
        Self::Succeeded,
        Self::Failed,
        Self::Cancelled,
        Self::Rejected,
        Self::Expired,
    ];

    /// As stored and shown.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Dispatched => "dispatched",
            Self::Accepted => "accepted",
            Self::Running => "running",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
            Self::Rejected => "rejected",
            Self::Expired => "expired",
        }
    }

    /// By its name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.name() == name)
    }

    /// Whether nothing changes it any more.
    pub fn is_terminal(self) -> bool {
        match self {
            Self::Pending | Self::Dispatched | Self::Accepted | Self::Running => false,
            Self::Succeeded | Self::Failed | Self::Cancelled | Self::Rejected | Self::Expired => true,
        }
    }
}
