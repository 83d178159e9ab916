//! `jiffy image`, `pull`, `push` and `commit`.
//!
//! * [`import`]: creates images from folders and archives.
//! * [`build`]: creates an image of a distribution.
//! * [`registry`]: pull and push.

mod build;
mod import;
mod registry;

pub use registry::{fetch, is_missing, pem, pull, pull_missing, push, snapshot};

use super::Context;
use super::context::{each, show, show_json};
use crate::args::image::{Commit, Image};
use crate::args::{JsonFormat, ListFormat};
use crate::client::{Client, encoded, vm_path};
use crate::failure::{Outcome, Result, report_all};
use crate::render::{Table, age, now, size};
use jiffy_wire::api::{self, CommitVm, Committed, Pruned};

/// `jiffy image`
///
/// # Errors
///
/// If there is no node, it refuses, or a file or stdout can't be used.
pub async fn image(context: &Context, image: Image) -> Result<Outcome> {
    let client = context.client()?;
    match image {
        Image::Pull(wanted) => pull(context, wanted).await,
        Image::Import(wanted) => import::import(&client, wanted).await,
        Image::Build(wanted) => build::build(&client, wanted).await,
        Image::Ls { quiet, format } => {
            let images: Vec<api::Image> = client.get("/v1/images").await?;
            list(&images, quiet, format)?;
            Ok(Outcome::Done)
        }
        Image::Inspect { names } => {
            let mut images = Vec::new();
            let outcome = each(&names, async |name| {
                images.push(get(&client, name).await?);
                Ok(())
            })
            .await?;
            show_json(&images)?;
            Ok(outcome)
        }
        Image::Rm { names } => {
            each(&names, async |name| {
                client.delete(&image_path(name)).await?;
                show(&format!("{name}\n"))
            })
            .await
        }
        Image::Prune { format } => {
            let pruned: Pruned = client.post("/v1/prune/images").await?;
            match format {
                Some(JsonFormat::Json) => show_json(&pruned)?,
                None => {
                    let names = pruned.names.iter().map(|name| format!("{name}\n"));
                    show(&names.collect::<String>())?;
                    show(&format!("freed {}\n", size(pruned.bytes)))?;
                }
            }
            Ok(Outcome::Done)
        }
    }
}

/// `jiffy commit`
///
/// # Errors
///
/// If there is no node, it refuses, or stdout can't be written.
pub async fn commit(context: &Context, commit: Commit) -> Result<Outcome> {
    let wanted = CommitVm {
        image: commit.image,
    };
    let client = context.client()?;
    let made: Committed = client
        .post_json(&vm_path(&commit.vm, "/commit"), &wanted)
        .await?;
    match commit.format {
        Some(JsonFormat::Json) => show_json(&made)?,
        None => show(&format!("{}\n", made.image.name))?,
    }
    Ok(Outcome::Done)
}

/// The registry of references without a host, `JIFFY_REGISTRY`.
pub fn default_registry() -> Option<String> {
    std::env::var("JIFFY_REGISTRY")
        .ok()
        .filter(|registry| !registry.is_empty())
}

/// Gets an image by its name or reference.
async fn get(client: &Client, name: &str) -> Result<api::Image> {
    client.get(&image_path(name)).await
}

fn image_path(name: &str) -> String {
    let registry = match default_registry() {
        Some(registry) => format!("?registry={}", encoded(&registry)),
        None => String::new(),
    };
    format!("/v1/images/{}{registry}", encoded(name))
}

fn show_image(image: &api::Image, format: Option<JsonFormat>) -> Result<Outcome> {
    match format {
        Some(JsonFormat::Json) => show_json(image)?,
        None => show(&format!("{}\n", image.name))?,
    }
    Ok(Outcome::Done)
}

fn list(images: &[api::Image], quiet: bool, format: ListFormat) -> Result<()> {
    if quiet {
        let names = images.iter().map(|image| format!("{}\n", image.name));
        return show(&names.collect::<String>());
    }
    if format == ListFormat::Json {
        return show_json(&images);
    }
    let now = now();
    let mut table = Table::new(["NAME", "DIGEST", "SIZE", "HERE", "SOURCE", "CREATED"]);
    for image in images {
        table.row([
            image.name.clone(),
            image.digest.chars().take(12).collect(),
            size(image.size),
            stored_share(image),
            source(image),
            format!("{} ago", age(image.created, now)),
        ]);
    }
    show(&table.to_string())?;
    report_all(images.iter().filter_map(|it| it.error.as_deref()));
    Ok(())
}

/// The percentage of its bytes that are stored here.
fn stored_share(image: &api::Image) -> String {
    match image.size {
        0 => "all".to_owned(),
        size if image.present >= size => "all".to_owned(),
        size => format!("{} %", image.present * 100 / size),
    }
}

/// Longest source shown in the list, in characters.
const MAX_SOURCE: usize = 40;

fn source(image: &api::Image) -> String {
    let Some(source) = &image.source else {
        return "-".to_owned();
    };
    let text = match &source.manifest {
        // The name shows its origin; the digest shows its version.
        Some(manifest) => manifest.as_str(),
        None => source.reference.as_str(),
    };
    let mut shown: String = text.chars().take(MAX_SOURCE).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    match source.manifest {
        Some(_) => shown.chars().take("sha256:".len() + 12).collect(),
        None => shown,
    }
}
