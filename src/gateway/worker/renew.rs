//! Renewals: a node that holds a certificate proves its key, and gets one for the next.

use std::sync::PoisonError;

use prost::Message as _;

use super::enrol::{Enrolment, Holder};
use super::{AskError, Csr, PROOF_AGE, Told, Worker, invalid};
use crate::model::{Digest, Reason, ServerTime};
use crate::wire::der::Der;
use crate::wire::dsse::{Audience, Verified, verify_document};
use crate::wire::enroll::{RenewAnswer, RenewProof, renew_request_digest};
use crate::wire::frames::read_envelope;
use crate::wire::{pb, shape};

impl Worker {
    pub(super) fn renew(&self, request: &[u8], leaf: &[u8], now: ServerTime) -> Result<Told, AskError> {
        let request = match shape::decode::<pb::RenewRequest>(request) {
            Ok(request) => request,
            Err(error) => return Ok(invalid(&error.to_string())),
        };
        let (csr, holder) = match self.check_renewal(&request, leaf, now) {
            Ok(checked) => checked,
            Err(refused) => return Ok(refused),
        };
        let renews = |enrolment: &mut Enrolment| {
            enrolment.used(&holder.serial)?;
            enrolment.renew(&holder)
        };
        let (issued, bundle, noted) = match self.issue(&csr, renews, renew_request_digest(&request), now)? {
            Ok(issued) => issued,
            Err(refused) => return Ok(refused),
        };
        let signed = self.sign_pinned::<RenewAnswer>(&RenewAnswer(issued))?;
        let response =
            pb::RenewResponse { signed_response: Some(signed.into()), trust_bundle: Some(bundle.into()) };
        tracing::info!(node = %noted.node, until = %noted.not_after, "certificate renewed");
        Ok(Told::Renewed(Der(response.encode_to_vec().into()), Box::new(noted)))
    }

    /// Who asks, proven by the key of a certificate of ours that holds now.
    fn check_renewal(
        &self,
        request: &pb::RenewRequest,
        leaf: &[u8],
        now: ServerTime,
    ) -> Result<(Csr, Holder), Told> {
        let csr = Csr::verify(&request.csr).map_err(|error| invalid(&error.to_string()))?;
        let holder = self.ca.holder(leaf, &self.trust_domain).ok_or_else(|| {
            let message = "the certificate is none of this deployment's nodes".to_owned();
            Told::Refused { reason: Reason::WrongIdentity, message }
        })?;
        if holder.not_after <= now {
            let message = "the certificate has run out; join again".to_owned();
            return Err(Told::Refused { reason: Reason::CertificateExpired, message });
        }
        let proof = request.proof.clone().ok_or_else(|| invalid("the proof is missing"))?;
        let proof = read_envelope(proof).map_err(|error| invalid(&error.to_string()))?;
        let audience = Audience { trust_domain: self.trust_domain.clone(), node_id: holder.node.clone() };
        let proof: Verified<RenewProof> = verify_document(&proof, &holder.key, Some(&audience))
            .map_err(|error| invalid(&format!("the proof does not hold: {error}")))?;
        let proof = proof.get();
        if proof.csr_sha256 != Digest::of(&request.csr) {
            return Err(invalid("the proof is over another certificate request"));
        }
        let mut challenges = self.challenges.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = match &proof.challenge {
            Some(text) => challenges.take(text, proof.issued_at, now),
            None => proof.issued_at.since(now).max(now.since(proof.issued_at)) <= PROOF_AGE,
        };
        if !taken {
            let message = format!("the proof is of {}, and it is {now}", proof.issued_at);
            let challenge = self.with_rng(|rng| challenges.give(now, rng));
            return Err(Told::ProofTime { time: now, challenge, message });
        }
        Ok((csr, holder))
    }
}
