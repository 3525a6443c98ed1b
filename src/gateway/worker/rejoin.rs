//! `x509pop`: a node whose certificate ran out while it was away joins again by the key of it. The proof is over the whole
//! request, the new key and the old certificates in it, and over a challenge that is taken once.

use std::sync::PoisonError;

use prost::Message as _;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::enrol::{Enrolment, Holder, RejoinTry};
use super::{AskError, Csr, Told, Worker, invalid};
use crate::model::limits::{CHAIN, JOIN_FACTS};
use crate::model::{Reason, ServerTime};
use crate::wire::der::Der;
use crate::wire::dsse::{Audience, Envelope};
use crate::wire::enroll::{REJOIN_BYTES, RejoinProof, X509POP, join_request_digest, rejoin_digest};
use crate::wire::{pb, shape};

/// Certificates of a chain of ours have about 700 bytes each.
const EVIDENCE_BYTES: usize = CHAIN * (8 << 10);

impl Worker {
    /// What a node must sign first. Whether it is let in is judged behind that: whoever has seen a certificate learns
    /// nothing of its node.
    pub(super) fn challenge(&self, request: &pb::JoinRequest, now: ServerTime) -> Told {
        let holder = match self.check_rejoin(request) {
            Ok((_, holder)) => holder,
            Err(refused) => return refused,
        };
        let mut challenges = self.join_challenges.lock().unwrap_or_else(PoisonError::into_inner);
        let challenge = self.with_rng(|rng| challenges.give(now, rng));
        let key = Der(holder.key.spki().to_vec().into());
        Told::Challenged { node: holder.node, serial: holder.serial, key, time: now, challenge }
    }

    /// Lets a node in again that has proven itself.
    pub(super) fn rejoin(&self, request: &[u8], proof: &Envelope, now: ServerTime) -> Result<Told, AskError> {
        let request = match shape::decode::<pb::JoinRequest>(request) {
            Ok(request) => request,
            Err(error) => return Ok(invalid(&error.to_string())),
        };
        let proven = self.check_rejoin(&request).and_then(|(csr, holder)| {
            self.check_proof(&request, &holder, proof, now)?;
            Ok((csr, holder))
        });
        let (csr, holder) = match proven {
            Ok(proven) => proven,
            Err(refused) => return Ok(refused),
        };
        let attempt = RejoinTry { holder: &holder, spki: csr.spki, window: self.rejoin_within, now };
        let joins = |enrolment: &mut Enrolment| enrolment.rejoin(&attempt);
        let digest = rejoin_digest(&join_request_digest(&request), &proof.clone().into());
        Ok(match self.issue(&csr, joins, digest, now)? {
            Ok(issued) => self.joined(issued)?,
            Err(refused) => refused,
        })
    }

    /// The new key, and who held the old certificate, if it is one of ours.
    fn check_rejoin(&self, request: &pb::JoinRequest) -> Result<(Csr, Holder), Told> {
        if request.attestor != X509POP {
            return Err(invalid("only the attestor x509pop is challenged"));
        }
        if !request.sealed_token.is_empty() {
            return Err(invalid("the attestor x509pop takes no token"));
        }
        if request.encoded_len() > REJOIN_BYTES {
            return Err(invalid("the request is too long for a re-join"));
        }
        if request.facts.len() > JOIN_FACTS {
            return Err(invalid("too many facts"));
        }
        if request.evidence.len() > EVIDENCE_BYTES {
            return Err(invalid("the evidence is too long for a certificate chain"));
        }
        let csr = Csr::verify(&request.csr).map_err(|error| invalid(&error.to_string()))?;
        let holder = leaf(&request.evidence).and_then(|leaf| self.ca.holder(leaf, &self.trust_domain));
        holder.map(|holder| (csr, holder)).ok_or_else(|| {
            let message = "the evidence is no certificate of this deployment's nodes".to_owned();
            Told::Refused { reason: Reason::WrongIdentity, message }
        })
    }

    fn check_proof(
        &self,
        request: &pb::JoinRequest,
        holder: &Holder,
        proof: &Envelope,
        now: ServerTime,
    ) -> Result<(), Told> {
        let audience = Audience { trust_domain: self.trust_domain.clone(), node_id: holder.node.clone() };
        let proof = RejoinProof::verify(proof, &holder.key, audience, join_request_digest(request))
            .map_err(|error| invalid(&error.to_string()))?;
        let proof = proof.get();
        let mut challenges = self.join_challenges.lock().unwrap_or_else(PoisonError::into_inner);
        if challenges.take(&proof.challenge, proof.issued_at, now) {
            return Ok(());
        }
        Err(invalid("the proof is over a challenge that is unknown, over 60 s old, or was answered before"))
    }
}

/// The first certificate of a chain.
fn leaf(chain: &[u8]) -> Option<&[u8]> {
    let (rest, _) = X509Certificate::from_der(chain).ok()?;
    chain.get(..chain.len() - rest.len())
}
