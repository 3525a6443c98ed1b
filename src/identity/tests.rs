use super::*;
use crate::model::ServerTime;
use stored::{KeyName, Pending};

/// A state directory with an identity whose parts fit together, and what it was made from.
pub(crate) struct Fixture {
    temp: tempfile::TempDir,
    pub(super) dir: StateDir,
    stored: StoredIdentity,
    pub(super) service: accept::tests::Service,
}

impl Fixture {
    pub(crate) fn state(&self) -> PathBuf {
        self.temp.path().join("state")
    }

    /// Replaces the identity by another of the same key.
    pub(crate) fn replace(&self, uris: [&str; 2], generation: u64) {
        stored(&self.dir, &self.service, &self.stored.key.0, uris, generation).write(&self.dir).unwrap();
    }

    /// A bundle of this version, signed by the pinned key or by another.
    pub(crate) fn bundle(&self, version: u64, pinned: bool) -> crate::wire::dsse::Envelope {
        let bundle = self.service.bundle(&accept::tests::authority());
        let bundle = crate::wire::bundle::TrustBundle { version, ..bundle };
        if pinned {
            self.service.sign_bundle(&bundle)
        } else {
            accept::tests::Service::new().sign_bundle(&bundle)
        }
    }

    /// A revocation of these serials of `node`.
    pub(crate) fn revocation(&self, node: &str, serials: &[&str]) -> crate::wire::dsse::Envelope {
        use crate::wire::dsse::Document as _;
        let revocation = Revocation {
            trust_domain: "lab.example".into(),
            node_id: NodeId::new(node).unwrap(),
            serials: serials.iter().map(|serial| (*serial).to_owned()).collect(),
            issued_at: ServerTime(1_790_000_000_000),
        };
        self.service.sign(Revocation::TYPE, &revocation)
    }

    fn identity(&self) -> PathBuf {
        self.state().join(stored::IDENTITY)
    }

    pub(crate) fn load(&self) -> Result<Identity, LoadError> {
        Identity::load(&self.state())
    }

    /// The error of loading it once `change` has been made to the file.
    fn refused(&self, change: impl FnOnce(&mut StoredIdentity)) -> LoadError {
        let mut changed = self.stored.clone();
        change(&mut changed);
        changed.write(&self.dir).unwrap();
        self.load().unwrap_err()
    }
}

pub(crate) const URIS: [&str; 2] = ["spiffe://lab.example/node/fra1/n-1", "urn:bc:role:host"];

pub(crate) fn joined() -> Fixture {
    let temp = tempfile::tempdir().unwrap();
    let dir = StateDir::ensure(&temp.path().join("state")).unwrap();
    let key = NodeKey::generate().unwrap();
    key.store(&dir).unwrap();
    let service = accept::tests::Service::new();
    let stored = stored(&dir, &service, &key.spki(), URIS, 1);
    stored.write(&dir).unwrap();
    Fixture { temp, dir, stored, service }
}

fn stored(
    dir: &StateDir,
    service: &accept::tests::Service,
    key: &Digest,
    uris: [&str; 2],
    generation: u64,
) -> StoredIdentity {
    let certificate = certificate::tests::certificate(&key_pair(dir, key), &uris);
    let leaf = Leaf::read(&certificate).unwrap();
    let mut bundle = service.bundle(&accept::tests::authority());
    bundle.trust_domain.clone_from(&leaf.trust_domain);
    let bundle = service.sign_bundle(&bundle);
    let accepted = Accepted {
        labels: crate::model::strict::StrictMap::default(),
        leaf: leaf.clone(),
        generation,
        chain: vec![certificate.clone()],
        join_signing_key: service.public.clone(),
        trust: Trust::verify(bundle, &service.public, &leaf.trust_domain).unwrap(),
        server_time: ServerTime(1),
    };
    StoredIdentity::new(&accepted, crate::model::Machine::default())
}

fn key_pair(dir: &StateDir, spki: &Digest) -> rcgen::KeyPair {
    let path = dir.path().join(keys::FOLDER).join(keys::file_name(spki));
    rcgen::KeyPair::from_pem(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn an_identity_is_loaded_with_its_key_even_when_its_certificate_is_out_of_time() {
    let fixture = joined();
    let identity = fixture.load().unwrap();
    assert_eq!(identity.node_id.as_str(), "n-1");
    assert_eq!(identity.fingerprint, fixture.stored.key.0);
    // rcgen's default validity began in 1975: nothing here looks at a clock.
    assert!(identity.leaf.validity.not_before < identity.leaf.validity.not_after);
}

#[test]
fn a_machine_that_has_not_joined_is_told_how_to() {
    let temp = tempfile::tempdir().unwrap();
    let error = Identity::load(&temp.path().join("none")).unwrap_err();
    assert_eq!(error.exit(), Exit::Configuration);
    assert!(error.to_string().contains("bcd join --ticket FILE"), "{error}");
}

#[test]
fn a_missing_key_names_its_file_and_the_mend() {
    let fixture = joined();
    let path = fixture.state().join("keys").join(keys::file_name(&fixture.stored.key.0));
    std::fs::remove_file(&path).unwrap();
    let text = fixture.load().unwrap_err().to_string();
    assert!(text.contains(&path.display().to_string()) && text.contains("bcd join"), "{text}");
}

#[test]
fn every_contradiction_with_the_certificate_is_refused_and_names_the_file() {
    let fixture = joined();
    let other = NodeKey::generate().unwrap();
    other.store(&fixture.dir).unwrap();
    let changes: [(&str, &dyn Fn(&mut StoredIdentity)); 6] = [
        ("node id", &|stored| stored.node_id = NodeId::new("n-2").unwrap()),
        ("role", &|stored| stored.role = Role::Ramdisk),
        ("site", &|stored| stored.site = "ams1".into()),
        ("trust domain", &|stored| stored.trust_domain = "evil.example".into()),
        ("key", &|stored| stored.key = KeyName(other.spki())),
        ("generation", &|stored| stored.generation = 0),
    ];
    for (what, change) in changes {
        let error = fixture.refused(change);
        assert!(matches!(error, LoadError::Contradiction { .. }), "{what}: {error}");
        let text = error.to_string();
        assert!(text.contains(what) && text.contains(&fixture.identity().display().to_string()), "{text}");
    }
    let error = fixture.refused(|stored| stored.chain = vec![(&[1, 2, 3][..]).into()]);
    assert!(matches!(error, LoadError::Certificate { .. }), "{error}");
}

#[test]
fn a_trust_bundle_that_somebody_else_put_into_the_file_is_refused() {
    let (fixture, foreign) = (joined(), accept::tests::Service::new());
    let bundle = foreign.sign_bundle(&foreign.bundle(&accept::tests::authority()));
    let error = fixture.refused(|stored| stored.trust_bundle = bundle);
    assert!(matches!(error, LoadError::Trust { .. }), "{error}");
    assert_eq!(error.exit(), Exit::Configuration);
}

#[test]
fn a_damaged_unknown_or_newer_file_is_refused_and_left_alone() {
    let fixture = joined();
    let text = std::fs::read_to_string(fixture.identity()).unwrap();
    let cases = [
        (text[..text.len() / 2].to_owned(), Exit::Configuration),
        (text.replace("\"site\"", "\"place\""), Exit::Configuration),
        (text.replace("\"format\": 1", "\"format\": 2"), Exit::ForeignState),
    ];
    for (content, exit) in cases {
        fixture.dir.write(stored::IDENTITY, content.as_bytes()).unwrap();
        let error = fixture.load().unwrap_err();
        assert_eq!(error.exit(), exit, "{error}");
        assert!(error.to_string().contains("identity.json"), "{error}");
        assert_eq!(std::fs::read_to_string(fixture.identity()).unwrap(), content);
    }
}

#[test]
fn a_key_that_others_may_read_is_refused_with_the_mend() {
    use std::os::unix::fs::PermissionsExt;
    let fixture = joined();
    let path = fixture.state().join("keys").join(keys::file_name(&fixture.stored.key.0));
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
    let error = fixture.load().unwrap_err();
    assert_eq!(error.exit(), Exit::Permission);
    assert!(error.to_string().contains(&format!("chmod 0600 {}", path.display())), "{error}");
}

#[test]
fn a_pending_join_reads_back() {
    let fixture = joined();
    assert_eq!(Pending::read(&fixture.dir).unwrap(), None);
    let pending = Pending::new(Digest::of(b"key"), Digest::of(b"token"));
    pending.write(&fixture.dir).unwrap();
    assert_eq!(Pending::read(&fixture.dir).unwrap(), Some(pending));
}

#[test]
fn an_identity_file_that_cannot_be_written_is_told_with_its_path_and_leaves_the_old_one_whole() {
    use crate::write_fault::{Point, arm};
    let fixture = joined();
    let before = std::fs::read(fixture.identity()).unwrap();
    let mut changed = fixture.stored.clone();
    changed.generation = 2;
    for point in Point::STATE {
        for (errno, hint) in
            [(5, ""), (28, "free some space"), (122, "free some space"), (30, "remount"), (24, "")]
        {
            let fault = arm(&fixture.state(), point, errno);
            let error = changed.write(&fixture.dir).unwrap_err();
            let text = format!("{error} {:?}", std::error::Error::source(&error));
            assert!(text.contains(hint) && text.contains(&*fixture.state().to_string_lossy()), "{text}");
            let key = NodeKey::generate().unwrap();
            // A key is a new file: it is never renamed.
            if point != Point::StateRename {
                key.store(&fixture.dir).unwrap_err();
            }
            drop(fault);
            // The rename of the last point had happened, and only its durability is not known.
            let now = std::fs::read(fixture.identity()).unwrap();
            assert!(now == before || point == Point::StateDirSync, "{}: {errno}", point.name());
            fixture.stored.write(&fixture.dir).unwrap();
            assert_eq!(fixture.load().unwrap().generation, 1);
        }
    }
}

#[test]
fn an_identity_file_that_no_start_could_read_is_never_written() {
    let fixture = joined();
    let dir = StateDir::open(&fixture.state()).unwrap().unwrap();
    let mut stored = StoredIdentity::read(&dir).unwrap().unwrap();
    stored.trust_bundle.payload = vec![0; 1 << 20].into();
    let refused = stored.write(&dir).unwrap_err();
    assert!(matches!(refused, FileError::TooLarge { .. }), "{refused}");
    assert!(fixture.load().is_ok(), "the old file stays");
}
