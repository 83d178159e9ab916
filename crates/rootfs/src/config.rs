//! An image's run configuration (OCI image-spec `config.md`).

use jiffy_oci::{Platform, null_as_default};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

/// Largest configuration that is read, bytes.
pub const MAX_CONFIG: u64 = 4 << 20;
/// Most strings in one list or map of a configuration.
const MAX_ITEMS: usize = 4096;
/// Most exposed ports; a range counts each of its ports.
const MAX_PORTS: usize = 65_536;
/// Longest string in a configuration, bytes (Linux MAX_ARG_STRLEN).
const MAX_STRING: usize = 128 << 10;

/// A port on which the image's program listens.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ExposedPort {
    /// Port number, not 0.
    pub port: u16,
    /// `tcp`, `udp` or `sctp`.
    pub protocol: String,
}

/// How to run an image, and its labels.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageConfig {
    /// The platform it was built for.
    pub platform: Platform,
    /// When it was built: RFC 3339, as written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created: Option<String>,
    /// The program and its first arguments.
    pub entrypoint: Vec<String>,
    /// Arguments after the entrypoint; the program itself if there is no entrypoint.
    pub cmd: Vec<String>,
    /// `NAME=VALUE`; each name appears once.
    pub env: Vec<String>,
    /// The program's working directory: absolute, or empty for `/`.
    pub working_dir: String,
    /// `USER[:GROUP]`, names or numbers; empty for root.
    pub user: String,
    /// Ports on which it listens.
    pub exposed_ports: BTreeSet<ExposedPort>,
    /// Folders that should outlive a container.
    pub volumes: BTreeSet<String>,
    /// The signal that stops the program: a name or a number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_signal: Option<String>,
    /// The image's labels.
    pub labels: BTreeMap<String, String>,
}

/// Why a configuration can't be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// It is larger than [`MAX_CONFIG`].
    #[error("the image's configuration has {0} bytes, the limit is {MAX_CONFIG}")]
    TooLarge(u64),
    /// It is not JSON, or not a configuration.
    #[error("the image's configuration is not valid")]
    Json(#[from] serde_json::Error),
    /// A field has an invalid value.
    #[error("the image's configuration has an invalid {field}, {value:?}: {what}")]
    Value {
        /// The field.
        field: &'static str,
        /// Its value, shortened.
        value: String,
        /// What is wrong with it.
        what: &'static str,
    },
}

/// The JSON, as OCI image-spec `config.md` and Docker write it.
#[derive(Deserialize)]
pub(crate) struct RawConfig {
    #[serde(default, deserialize_with = "null_as_default")]
    pub architecture: String,
    #[serde(default, deserialize_with = "null_as_default")]
    pub os: String,
    #[serde(default, deserialize_with = "null_as_default")]
    pub variant: String,
    pub created: Option<String>,
    #[serde(default, deserialize_with = "null_as_default")]
    config: RawRun,
    #[serde(default, deserialize_with = "null_as_default")]
    pub rootfs: RawRootfs,
}

#[derive(Deserialize, Default)]
pub(crate) struct RawRootfs {
    #[serde(default, deserialize_with = "null_as_default")]
    pub diff_ids: Vec<String>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "PascalCase")]
struct RawRun {
    #[serde(default, deserialize_with = "null_as_default")]
    entrypoint: Vec<String>,
    #[serde(default, deserialize_with = "null_as_default")]
    cmd: Vec<String>,
    #[serde(default, deserialize_with = "null_as_default")]
    env: Vec<String>,
    #[serde(default, deserialize_with = "null_as_default")]
    working_dir: String,
    #[serde(default, deserialize_with = "null_as_default")]
    user: String,
    #[serde(default, deserialize_with = "null_as_default")]
    exposed_ports: BTreeMap<String, serde::de::IgnoredAny>,
    #[serde(default, deserialize_with = "null_as_default")]
    volumes: BTreeMap<String, serde::de::IgnoredAny>,
    stop_signal: Option<String>,
    #[serde(default, deserialize_with = "null_as_default")]
    labels: BTreeMap<String, String>,
}

impl ImageConfig {
    /// Reads an OCI (or Docker) image configuration.
    ///
    /// # Errors
    ///
    /// If it has more than [`MAX_CONFIG`] bytes, is not such JSON, or a field has an invalid value,
    /// too many or too long ones.
    pub fn from_json(json: &[u8]) -> Result<ImageConfig, ConfigError> {
        RawConfig::from_json(json)?.into_config()
    }

    /// The program and its arguments; a `cmd` that is not empty replaces the image's own.
    pub fn command(&self, cmd: &[String]) -> Vec<String> {
        let arguments = if cmd.is_empty() { &self.cmd } else { cmd };
        [&self.entrypoint[..], arguments].concat()
    }
}

impl RawConfig {
    pub(crate) fn from_json(json: &[u8]) -> Result<RawConfig, ConfigError> {
        if json.len() as u64 > MAX_CONFIG {
            return Err(ConfigError::TooLarge(json.len() as u64));
        }
        Ok(serde_json::from_slice(json)?)
    }

    pub(crate) fn platform(&self) -> Platform {
        Platform {
            os: self.os.clone(),
            architecture: self.architecture.clone(),
            variant: self.variant.clone(),
        }
    }

    pub(crate) fn into_config(self) -> Result<ImageConfig, ConfigError> {
        let platform = self.platform();
        let run = self.config;
        check_list("Entrypoint", &run.entrypoint)?;
        check_list("Cmd", &run.cmd)?;
        check_list("Env", &run.env)?;
        for variable in &run.env {
            if variable.find('=').is_none_or(|at| at == 0) {
                return Err(invalid_field("Env", variable, "it is not NAME=VALUE"));
            }
        }
        check_string("WorkingDir", &run.working_dir)?;
        check_string("User", &run.user)?;
        check_count("Volumes", run.volumes.len())?;
        for volume in run.volumes.keys() {
            check_string("Volumes", volume)?;
        }
        check_count("Labels", run.labels.len())?;
        for text in run.labels.iter().flat_map(|(name, value)| [name, value]) {
            check_string("Labels", text)?;
        }
        if let Some(signal) = &run.stop_signal {
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"+-".contains(&byte);
            if signal.len() > 20 || !signal.bytes().all(plain) {
                return Err(invalid_field("StopSignal", signal, "it is not a signal"));
            }
        }
        if let Some(created) = &self.created {
            check_string("created", created)?;
        }
        Ok(ImageConfig {
            platform,
            created: self.created,
            entrypoint: run.entrypoint,
            cmd: run.cmd,
            env: dedup_env(run.env),
            working_dir: run.working_dir,
            user: run.user,
            exposed_ports: ports(run.exposed_ports.keys())?,
            volumes: run.volumes.into_keys().collect(),
            stop_signal: run.stop_signal.filter(|signal| !signal.is_empty()),
            labels: run.labels,
        })
    }
}

/// Each variable once: its last value, at the position of its first.
fn dedup_env(env: Vec<String>) -> Vec<String> {
    let mut place: BTreeMap<String, usize> = BTreeMap::new();
    let mut out: Vec<String> = Vec::with_capacity(env.len());
    for variable in env {
        let name = variable.split('=').next().unwrap_or_default().to_owned();
        match place.get(&name) {
            Some(index) => out[*index] = variable,
            None => {
                place.insert(name, out.len());
                out.push(variable);
            }
        }
    }
    out
}

/// Parses ports: `80`, `80/tcp` or `8000-8010/udp`.
fn ports<'a>(
    texts: impl Iterator<Item = &'a String>,
) -> Result<BTreeSet<ExposedPort>, ConfigError> {
    let mut ports = BTreeSet::new();
    let mut count = 0;
    for text in texts {
        let refuse = || invalid_field("ExposedPorts", text, "it is not a port");
        let (numbers, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
        let (first, last) = numbers.split_once('-').unwrap_or((numbers, numbers));
        let number = |text: &str| text.parse::<u16>().ok().filter(|port| *port > 0);
        let (first, last) = number(first).zip(number(last)).ok_or_else(refuse)?;
        let protocol = protocol.to_ascii_lowercase();
        if !["tcp", "udp", "sctp"].contains(&protocol.as_str()) || first > last {
            return Err(refuse());
        }
        count += usize::from(last - first) + 1;
        if count > MAX_PORTS {
            return Err(invalid_field(
                "ExposedPorts",
                text,
                "there are too many ports",
            ));
        }
        ports.extend((first..=last).map(|port| ExposedPort {
            port,
            protocol: protocol.clone(),
        }));
    }
    Ok(ports)
}

fn check_list(field: &'static str, list: &[String]) -> Result<(), ConfigError> {
    check_count(field, list.len())?;
    list.iter().try_for_each(|text| check_string(field, text))
}

fn check_count(field: &'static str, count: usize) -> Result<(), ConfigError> {
    if count > MAX_ITEMS {
        return Err(invalid_field(
            field,
            &count.to_string(),
            "there are too many",
        ));
    }
    Ok(())
}

fn check_string(field: &'static str, text: &str) -> Result<(), ConfigError> {
    if text.len() > MAX_STRING {
        return Err(invalid_field(field, text, "it is too long"));
    }
    if text.contains('\0') {
        return Err(invalid_field(field, text, "it contains a NUL byte"));
    }
    Ok(())
}

fn invalid_field(field: &'static str, value: &str, what: &'static str) -> ConfigError {
    ConfigError::Value {
        field,
        value: value.chars().take(60).collect(),
        what,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WHOLE: &[u8] = br#"{
        "architecture": "arm64", "os": "linux", "variant": "v8",
        "created": "2024-01-02T03:04:05Z",
        "config": {
            "Entrypoint": ["/docker-entrypoint.sh"], "Cmd": ["nginx", "-g"],
            "Env": ["PATH=/bin", "A=1", "A=2"], "WorkingDir": "/srv", "User": "www:33",
            "ExposedPorts": {"80/tcp": {}, "53/udp": {}, "8000-8001": {}},
            "Volumes": {"/data": {}}, "StopSignal": "SIGQUIT",
            "Labels": {"maintainer": "somebody"}
        },
        "rootfs": {"type": "layers", "diff_ids": ["sha256:00"]},
        "history": [{"created_by": "x"}]
    }"#;

    #[test]
    fn every_field_of_a_config_is_read() {
        let config = ImageConfig::from_json(WHOLE).unwrap();
        assert_eq!(config.platform.to_string(), "linux/arm64/v8");
        assert_eq!(config.created.as_deref(), Some("2024-01-02T03:04:05Z"));
        assert_eq!(
            config.command(&[]),
            ["/docker-entrypoint.sh", "nginx", "-g"]
        );
        assert_eq!(
            config.command(&["sh".into()]),
            ["/docker-entrypoint.sh", "sh"]
        );
        assert_eq!(config.env, ["PATH=/bin", "A=2"]);
        assert_eq!(
            (config.working_dir, config.user),
            ("/srv".into(), "www:33".into())
        );
        let ports: Vec<_> = config
            .exposed_ports
            .iter()
            .map(|port| format!("{}/{}", port.port, port.protocol))
            .collect();
        assert_eq!(ports, ["53/udp", "80/tcp", "8000/tcp", "8001/tcp"]);
        assert_eq!(config.volumes.first().unwrap(), "/data");
        assert_eq!(config.stop_signal.as_deref(), Some("SIGQUIT"));
        assert_eq!(config.labels["maintainer"], "somebody");
    }

    #[test]
    fn nulls_and_absent_fields_are_empty() {
        let config = ImageConfig::from_json(
            br#"{"config":{"Cmd":null,"Env":null,"Labels":null,"ExposedPorts":null}}"#,
        )
        .unwrap();
        assert_eq!(config.cmd, Vec::<String>::new());
        assert!(ImageConfig::from_json(br#"{"config":null}"#).is_ok());
    }

    #[test]
    fn an_invalid_config_is_refused_with_a_message() {
        let refusal = |run: &str| {
            ImageConfig::from_json(format!(r#"{{"config":{{{run}}}}}"#).as_bytes())
                .unwrap_err()
                .to_string()
        };
        assert!(refusal(r#""Env":["=x"]"#).contains("not NAME=VALUE"));
        assert!(refusal(r#""ExposedPorts":{"0/tcp":{}}"#).contains("not a port"));
        assert!(refusal(r#""ExposedPorts":{"80/icmp":{}}"#).contains("not a port"));
        assert!(refusal(r#""StopSignal":"; reboot""#).contains("not a signal"));
        assert!(refusal(r#""Cmd":["a\u0000b"]"#).contains("NUL"));
        assert!(ImageConfig::from_json(b"[]").is_err());
        let many = format!(r#""Cmd":[{}"x"]"#, r#""x","#.repeat(5000));
        assert!(refusal(&many).contains("too many"));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in ".{0,200}") {
            let _ = ImageConfig::from_json(text.as_bytes());
            let inside = format!(r#"{{"config":{{"ExposedPorts":{{{}:{{}}}}}}}}"#, serde_json::json!(text));
            let _ = ImageConfig::from_json(inside.as_bytes());
        }
    }
}
