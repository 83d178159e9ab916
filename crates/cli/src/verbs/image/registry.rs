//! `jiffy pull` and `jiffy push`: the node talks to the registry and reports progress.

use super::{default_registry, get, show_image};
use crate::args::JsonFormat;
use crate::args::image::{Pull, PullWhen, Push, RegistryOptions};
use crate::client::{Client, JsonLines};
use crate::failure::{Failure, Outcome, Result};
use crate::render::harmless;
use crate::verbs::Context;
use crate::verbs::context::{show, show_json};
use hyper::body::Incoming;
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use jiffy_wire::api::{ArtifactKind, PullImage, PullStep, PushArtifact, RegistryAccess};
use serde_json::json;
use std::collections::HashMap;
use std::io::Read;
use std::path::Path;

/// Longest password, in bytes.
const MAX_PASSWORD: u64 = 64 * 1024;
/// Largest file of certificates, in bytes.
const MAX_PEM: u64 = 4 << 20;
/// Digits of a digest that are shown beside its bar.
const DIGITS: usize = 19;

/// `jiffy pull`
///
/// # Errors
///
/// If a key or certificate file can't be read, there is no node, the pull fails, or the connection
/// is lost.
pub async fn pull(context: &Context, wanted: Pull) -> Result<Outcome> {
    let mut access = access(&wanted.registry)?;
    if let Some(file) = &wanted.verify_key {
        access.verify_key = Some(pem(file)?);
    }
    let request = PullImage {
        reference: wanted.reference,
        renew: true,
        platform: wanted.platform,
        access,
    };
    let client = context.client()?;
    match follow(client.post_stream("/v1/pulls", &request).await?).await? {
        PullStep::Pulled { image, fetched } => match wanted.format {
            Some(JsonFormat::Json) => {
                show_json(&json!({ "image": image, "fetched": fetched }))?;
                Ok(Outcome::Done)
            }
            None => show_image(&image, None),
        },
        PullStep::PulledSnapshot { snapshot, fetched } => {
            match wanted.format {
                Some(JsonFormat::Json) => {
                    show_json(&json!({ "snapshot": snapshot, "fetched": fetched }))?;
                }
                None => show(&format!("{}\n", snapshot.name))?,
            }
            Ok(Outcome::Done)
        }
        _ => Err(JsonLines::not_understood()),
    }
}

/// `jiffy push`
///
/// # Errors
///
/// If a certificate file can't be read, there is no node, the push fails, or the connection is
/// lost.
pub async fn push(context: &Context, wanted: Push) -> Result<Outcome> {
    let request = PushArtifact {
        name: wanted.name,
        kind: wanted.snapshot.then_some(ArtifactKind::Snapshot),
        reference: wanted.reference,
        access: access(&wanted.registry)?,
    };
    let client = context.client()?;
    match follow(client.post_stream("/v1/pushes", &request).await?).await? {
        PullStep::Pushed {
            manifest,
            sent,
            had,
        } => {
            match wanted.format {
                Some(JsonFormat::Json) => {
                    show_json(&json!({ "manifest": manifest, "sent": sent, "had": had }))?;
                }
                None => show(&format!("{manifest}\n"))?,
            }
            Ok(Outcome::Done)
        }
        _ => Err(JsonLines::not_understood()),
    }
}

/// Whether the node says that it has no image of this name or reference, or that it is neither.
pub async fn is_missing(client: &Client, image: &str) -> bool {
    get(client, image)
        .await
        .is_err_and(|failure| failure.is_about_a_name())
}

/// Pulls a missing image if its name is a reference. True if it was pulled.
///
/// # Errors
///
/// If the pull fails.
pub async fn pull_missing(client: &Client, image: &str) -> Result<bool> {
    let named = image.contains(['/', ':', '@']);
    if !named && default_registry().is_none() {
        return Ok(false);
    }
    fetch(client, image, false, None).await?;
    Ok(true)
}

/// The name of a snapshot on the node; a missing one is pulled if the name is a reference.
///
/// # Errors
///
/// If a key is given for a snapshot of this node, the pull fails, or the name is an image's.
pub async fn snapshot(
    client: &Client,
    name: &str,
    when: PullWhen,
    key: Option<&str>,
) -> Result<String> {
    if !name.contains(['/', ':', '@']) {
        return match key {
            None => Ok(name.to_owned()),
            Some(_) => Err(Failure::new(format!(
                "the snapshot {name} was created on this node, so it has no signature"
            ))),
        };
    }
    if when == PullWhen::Never {
        return Ok(name.to_owned());
    }
    if when == PullWhen::Missing && key.is_none() {
        let found = crate::verbs::snapshot::get(client, name).await;
        match found {
            Ok(snapshot) => return Ok(snapshot.name),
            Err(failure) if failure.is_not_found() => {}
            Err(failure) => return Err(failure),
        }
    }
    match fetch(client, name, when == PullWhen::Always, key).await? {
        PullStep::PulledSnapshot { snapshot, .. } => Ok(snapshot.name),
        _ => Err(Failure::new(format!("{name} is an image, not a snapshot"))
            .hint(format!("jiffy run {name}"))),
    }
}

/// Pulls an image for a VM; with a key, only if it is signed with that key.
///
/// # Errors
///
/// If the pull fails, or the connection is lost.
pub async fn fetch(
    client: &Client,
    image: &str,
    renew: bool,
    key: Option<&str>,
) -> Result<PullStep> {
    let mut access = access(&RegistryOptions::default())?;
    access.verify_key = key.map(str::to_owned);
    let request = PullImage {
        reference: image.to_owned(),
        renew,
        platform: None,
        access,
    };
    let body = client.post_stream("/v1/pulls", &request).await?;
    follow(body).await
}

/// Registry access from the options.
fn access(options: &RegistryOptions) -> Result<RegistryAccess> {
    let credentials = match &options.creds {
        None => None,
        Some(creds) if options.password_stdin => {
            let mut password = String::new();
            std::io::stdin()
                .take(MAX_PASSWORD)
                .read_to_string(&mut password)
                .map_err(|error| Failure::io("the password can't be read from stdin", error))?;
            let password = password.trim_end_matches(['\r', '\n']).to_owned();
            Some((creds.clone(), password))
        }
        Some(creds) => match creds.split_once(':') {
            Some((user, password)) => Some((user.to_owned(), password.to_owned())),
            None => {
                return Err(Failure::new("--creds has no password")
                    .hint("write USER:PASSWORD, or give the password with --password-stdin"));
            }
        },
    };
    Ok(RegistryAccess {
        credentials,
        plain_http: options.plain_http,
        ca: options.ca.as_deref().map(pem).transpose()?,
        registry: default_registry(),
        ..RegistryAccess::default()
    })
}

/// The text of a PEM file.
///
/// # Errors
///
/// If the file can't be read, or is not PEM.
pub fn pem(file: &Path) -> Result<String> {
    let failed = |error| Failure::io(format_args!("{} can't be read", file.display()), error);
    let mut text = String::new();
    std::fs::File::open(file)
        .map_err(failed)?
        .take(MAX_PEM)
        .read_to_string(&mut text)
        .map_err(failed)?;
    if !text.contains("-----BEGIN ") {
        return Err(Failure::new(format!(
            "{} is not a PEM file",
            file.display()
        )));
    }
    Ok(text)
}

/// Shows the steps of a pull or push as progress bars; returns the last one.
async fn follow(body: Incoming) -> Result<PullStep> {
    let mut bars = Bars::new();
    let mut steps = JsonLines::new(body);
    while let Some(step) = steps.next().await? {
        match step {
            PullStep::Doing(what) => bars.doing(&what),
            PullStep::Blob {
                digest,
                done,
                total,
            } => bars.moved(&digest, done, total),
            PullStep::Failed(error) => return Err(error.into()),
            end => return Ok(end),
        }
    }
    Err(Failure::new("the connection to jiffyd was lost")
        .hint("try again: blobs that were fetched are kept")
        .kind(crate::failure::Kind::Unreachable))
}

/// A bar for each blob, and the current step; nothing if stderr is not a terminal. They are removed
/// when this is dropped.
struct Bars {
    all: MultiProgress,
    doing: ProgressBar,
    blobs: HashMap<String, ProgressBar>,
}

impl Bars {
    fn new() -> Bars {
        let all = MultiProgress::with_draw_target(ProgressDrawTarget::stderr());
        let doing = all.add(ProgressBar::new_spinner());
        if let Ok(style) = ProgressStyle::with_template("  {msg}") {
            doing.set_style(style);
        }
        Bars {
            all,
            doing,
            blobs: HashMap::new(),
        }
    }

    fn doing(&self, what: &str) {
        self.doing.set_message(harmless(what).into_owned());
    }

    fn moved(&mut self, digest: &str, done: u64, total: u64) {
        let bar = self.blobs.entry(digest.to_owned()).or_insert_with(|| {
            let bar = self.all.add(ProgressBar::new(total));
            let template = "  {prefix:19} {bar:30} {bytes} of {total_bytes}";
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style);
            }
            let short: String = harmless(digest).chars().take(DIGITS).collect();
            bar.set_prefix(short);
            bar
        });
        bar.set_length(total);
        bar.set_position(done);
    }
}

impl Drop for Bars {
    fn drop(&mut self) {
        let _ = self.all.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_needs_a_password() {
        let of = |creds: &str| {
            access(&RegistryOptions {
                creds: Some(creds.into()),
                ..RegistryOptions::default()
            })
        };
        let pair = ("me".to_owned(), "a:b".to_owned());
        assert_eq!(of("me:a:b").unwrap().credentials, Some(pair));
        assert!(
            of("me")
                .unwrap_err()
                .hint
                .unwrap()
                .contains("--password-stdin")
        );
        let none = access(&RegistryOptions::default()).unwrap();
        assert_eq!(none.credentials, None);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "no pem").unwrap();
        assert!(pem(file.path()).unwrap_err().message.contains("PEM"));
    }
}
