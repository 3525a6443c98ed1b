//! What a worker is asked, what it is ordered, and what it answers.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::model::{CommandId, NodeId, Reason, Role, ServerTime};
use crate::wire::der::Der;
use crate::wire::dsse::Envelope;

/// What a gateway may ask. It decides where it is dialed and under which names it serves; nothing of it commands a node.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ask {
    /// A certificate to serve with.
    Serve {
        /// Its certificate request.
        csr: Der,
        /// Its id.
        gateway: String,
        /// host:port of each of its addresses, for tickets and bundles: what it said before is replaced.
        endpoints: Vec<String>,
    },
    /// A JoinRequest to answer.
    Join(Der),
    /// A JoinRequest that was challenged, and the proof that came back.
    Rejoin {
        /// The request.
        request: Der,
        /// The proof.
        proof: Envelope,
    },
    /// A RenewRequest to answer, and the certificate that the call came with.
    Renew {
        /// The request.
        request: Der,
        /// The caller's certificate.
        leaf: Der,
    },
    /// The newest trust bundle.
    Bundle,
    /// A node's signed report that its machine leaves.
    Leave {
        /// Who sent it; another's report is refused.
        node: NodeId,
        /// The report.
        report: Envelope,
    },
    /// Results to judge, each with the node that it came from.
    Facts(Vec<Claim>),
}

/// What the operator orders.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// A join ticket.
    Ticket(TicketTerms),
    /// A command to sign.
    Command(Draft),
    /// The cancellation of a command to sign.
    Cancel {
        /// Whose.
        node: NodeId,
        /// Which.
        id: CommandId,
    },
    /// Renews no certificate of a node any more.
    Revoke(NodeId),
    /// The same, and signs it for the node, which keeps it.
    RevokeForGood(NodeId),
    /// Takes that back; what was signed stays true.
    Unrevoke(NodeId),
    /// Forgets a node: its machine needs a new ticket.
    Forget(NodeId),
    /// What was made of results, behind a number.
    Facts {
        /// The number.
        after: u64,
    },
}

/// What the operator wants of a ticket.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TicketTerms {
    /// Machines that may use it.
    pub uses: u32,
    /// Holds this long, seconds.
    pub ttl_s: u64,
    /// Where those machines stand.
    pub site: String,
    /// What they are called.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
}

impl TicketTerms {
    /// Without labels.
    pub fn new(uses: u32, ttl_s: u64, site: &str) -> Self {
        Self { uses, ttl_s, site: site.to_owned(), labels: BTreeMap::new() }
    }
}

/// A command, as the operator words it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Draft {
    /// For whom.
    pub node: NodeId,
    /// The kind's name, as it will stand in the body; also one that no node knows.
    pub kind: String,
    /// The arguments, verbatim.
    pub args: Box<RawValue>,
    /// not_after lies this far ahead, seconds.
    pub ttl_s: u64,
    /// A command id of the caller's; absent: a new one.
    #[serde(default)]
    pub id: Option<CommandId>,
}

/// What it answers.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Told {
    /// To Serve: the chain, leaf first, and the CA that signs nodes.
    Serving {
        /// For TLS.
        chain: Vec<Der>,
        /// What node certificates chain to.
        node_root: Der,
        /// The deployment's name.
        trust_domain: String,
    },
    /// To Join: who must prove first that it is who it says.
    Challenged {
        /// Whose certificate it comes with.
        node: NodeId,
        /// Of that certificate, hex.
        serial: String,
        /// Its key, SubjectPublicKeyInfo.
        key: Der,
        /// The worker's clock.
        time: ServerTime,
        /// Taken once.
        challenge: String,
    },
    /// To Join and Rejoin: the JoinResponse to relay, and what the gateway may note.
    Joined(Der, Box<Noted>),
    /// To Renew: the RenewResponse to relay, and what the gateway may note.
    Renewed(Der, Box<Noted>),
    /// To Leave: the node that is no more.
    Left(NodeId),
    /// To Facts of a gateway: one each, in their order.
    Judged(Vec<Judged>),
    /// To Facts of the operator: oldest first, at most a thousand.
    Facts(Vec<FactView>),
    /// To Ticket: its one line.
    Ticket(String),
    /// To Bundle.
    Bundle {
        /// Its version.
        version: u64,
        /// As it was signed.
        envelope: Envelope,
    },
    /// To Renew, whose proof has another time than the worker: the next proof signs these two.
    ProofTime {
        /// The worker's clock.
        time: ServerTime,
        /// Taken once.
        challenge: String,
        /// For people.
        message: String,
    },
    /// To Command, Cancel and RevokeForGood.
    Signed(Envelope),
    /// To the other orders.
    Done,
    /// A node is refused.
    Refused {
        /// The token.
        reason: Reason,
        /// For people.
        message: String,
    },
    /// What was asked cannot be done.
    Failed(String),
}

/// What a node has said of a command's end, as a gateway has it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Claim {
    /// From whom it came.
    pub node: NodeId,
    /// The CommandUpdate, encoded.
    pub update: Der,
}

/// What the worker makes of one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Judged {
    /// Why it does not hold; absent: it does.
    pub refused: Option<Reason>,
    /// For people.
    pub message: String,
}

/// The same, as the worker keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FactView {
    /// Its number.
    pub number: u64,
    /// When it came first, ms since the Unix epoch by the worker's clock.
    pub at_ms: i64,
    /// The command.
    pub command: CommandId,
    /// Whose: as signed, or, of what does not hold, as claimed.
    pub node: NodeId,
    /// `succeeded`, `failed`, `cancelled` or `rejected`.
    pub state: String,
    /// Reason token; empty for none.
    pub reason: String,
    /// `none`, `complete` or `unknown`.
    pub effect: String,
    /// Executions.
    pub attempt: u32,
    /// Of the certificate under which it holds; empty where it does not.
    pub serial: String,
    /// Why it does not hold, a token; empty: it does.
    pub refused: String,
    /// For people.
    pub detail: String,
}

/// What a gateway notes of a certificate that was issued.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Noted {
    /// The node.
    pub node: NodeId,
    /// Where it stands.
    pub site: String,
    /// What it is called.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// host or ramdisk.
    pub role: Role,
    /// Its identity generation.
    pub generation: u64,
    /// Of the certificate, hex.
    pub serial: String,
    /// When it runs out.
    pub not_after: ServerTime,
}
