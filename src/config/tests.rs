use super::*;

fn apply(text: &str) -> Result<Config, ConfigError> {
    let mut config = Config::defaults();
    config.apply_file(Path::new("bcd.toml"), text).map(|()| config)
}

fn message(text: &str) -> String {
    let error = apply(text).unwrap_err();
    assert_eq!(error.exit(), Exit::Configuration);
    error.to_string()
}

#[test]
fn a_typo_names_file_key_and_nearest_key() {
    for (text, key, near) in [
        ("[gateway]\nendpoint = []", "gateway.endpoint", "gateway.endpoints"),
        ("[path]\nstate = \"/x\"", "path.state", "paths.state"),
        ("[log]\nlevle = \"info\"", "log.levle", "log.level"),
        ("[kind]", "kind", "kinds.deny"),
        ("[gateway]\ndeny = []", "gateway.deny", "kinds.deny"),
        ("loglevel = \"info\"", "loglevel", "log.level"),
    ] {
        let message = message(text);
        assert!(message.contains(&format!("bcd.toml: unknown key {key};")), "{message}");
        assert!(message.contains(&format!("did you mean {near}?")), "{message}");
    }
    let message = message("[zz]\nqq = 1");
    assert!(message.contains("the keys are: gateway.endpoints,"), "{message}");
}

#[test]
fn a_wrong_value_names_the_key_and_what_is_allowed() {
    for (text, key, allowed) in [
        ("[log]\nlevel = \"loud\"", "log.level", "error, warn, info"),
        ("[log]\nlevel = 3", "log.level", "error, warn, info"),
        ("[log]\nformat = \"xml\"", "log.format", "auto, journald, text, json"),
        ("[paths]\nstate = \"var\"", "paths.state", "an absolute path"),
        ("[gateway]\nendpoints = \"gw:1\"", "gateway.endpoints", "a list of"),
        ("[gateway]\nendpoints = [\"gw\"]", "gateway.endpoints", "a list of"),
        ("[signatures]\ncommands = \"some\"", "signatures.commands", "all, destructive"),
        ("[limits]\nevents = 1", "limits.events", "a number from 100"),
        ("[limits]\nevents = \"many\"", "limits.events", "a number from 100"),
        ("[limits]\nevent_bytes = -1", "limits.event_bytes", "a number from 1048576"),
        ("[kinds]\ndeny = [\"Node Exec\"]", "kinds.deny", "a list of kinds"),
    ] {
        let message = message(text);
        assert!(message.contains(&format!("{key} cannot be")), "{message}");
        assert!(message.contains(&format!("allowed: {allowed}")), "{message}");
    }
}

#[test]
fn what_is_not_toml_names_the_line() {
    let message = message("[log]\nlevel = info\n");
    assert!(message.contains("line 2"), "{message}");
    assert!(apply("[log]\nlevel = \"info\"\nlevel = \"warn\"").is_err(), "a doubled key");
}

#[test]
fn a_flag_wins_over_the_environment_and_that_over_the_file() {
    let temp = tempfile::tempdir().unwrap();
    let file = temp.path().join("bcd.toml");
    std::fs::write(&file, "[paths]\nstate = \"/file\"\nrun = \"/file\"\n[log]\nlevel = \"warn\"\n").unwrap();
    let flags = Flags { file: Some(file.clone()), values: vec![("paths.state", "--state", "/flag".into())] };
    let environment = |name: &str| match name {
        "BCD_STATE" | "BCD_RUN" => Some("/environment".to_owned()),
        "BCD_GATEWAY_ENDPOINTS" => Some("gw1:443, gw2:443".to_owned()),
        _ => None,
    };
    let config = Config::load(&flags, environment).unwrap();
    assert_eq!(config.state, Path::new("/flag"));
    assert_eq!(config.run, Path::new("/environment"));
    assert_eq!(config.endpoints.len(), 2);
    let sources: BTreeMap<_, _> =
        config.effective().into_iter().map(|(key, _, source)| (key.name, source)).collect();
    assert_eq!(sources["paths.state"], Source::Flag("--state"));
    assert_eq!(sources["paths.run"], Source::Environment("BCD_RUN"));
    assert_eq!(sources["log.level"], Source::File(file));
    assert_eq!(sources["log.format"], Source::Default);
}

#[test]
fn a_named_file_must_exist() {
    let flags = Flags { file: Some("/nowhere/bcd.toml".into()), values: Vec::new() };
    let error = Config::load(&flags, |_| None).unwrap_err();
    assert!(error.to_string().contains("/nowhere/bcd.toml"), "{error}");
}

#[test]
fn an_unknown_kind_may_be_denied_and_is_warned_of() {
    let config = apply("[kinds]\ndeny = [\"disk.wipe\", \"node.exce\", \"node.probe\"]").unwrap();
    assert_eq!(config.denied.len(), 3);
    let warnings = config.warnings();
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[1].contains("did you mean node.exec?"), "{warnings:?}");
}

#[test]
fn more_of_the_audit_than_half_of_the_budget_is_warned_of() {
    assert_eq!(apply("[audit]\nfiles = 10").unwrap().warnings(), Vec::<String>::new());
    let warnings = apply("[audit]\nfiles = 100").unwrap().warnings();
    assert!(warnings[0].contains("limits.state_bytes"), "{warnings:?}");
    for bad in ["files = 0", "files = 1001", "file_bytes = 100"] {
        assert!(apply(&format!("[audit]\n{bad}")).is_err(), "{bad}");
    }
}

#[test]
fn effective_values_read_back_as_a_file() {
    let config = apply("[gateway]\nendpoints = [\"gw1:443\"]\n[kinds]\ndeny = [\"disk.wipe\"]").unwrap();
    let text: String =
        config.effective().iter().map(|(key, value, _)| format!("{} = {value}\n", key.name)).collect();
    let again = apply(&text).unwrap();
    assert_eq!(again.endpoints, config.endpoints);
    assert_eq!(again.denied, config.denied);
}

#[test]
fn the_document_shows_the_table_of_keys() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/config.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let table = reference();
    if std::env::var_os("BLESS").is_some() {
        let start = text.find("| key |").unwrap_or(text.len());
        let end = text[start..].find("\n\n").map_or(text.len(), |at| start + at + 1);
        std::fs::write(&path, format!("{}{table}{}", &text[..start], &text[end..])).unwrap();
        return;
    }
    assert!(text.contains(&table), "docs/config.md is behind the code; make it again with BLESS=1:\n{table}");
}
