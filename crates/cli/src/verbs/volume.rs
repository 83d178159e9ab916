//! `jiffy volume`

use super::Context;
use super::context::{each, show, show_json};
use crate::args::{ListFormat, Volume};
use crate::client::encoded;
use crate::failure::{Outcome, Result, report, report_all};
use crate::render::{Table, size};
use jiffy_wire::api;

/// `jiffy volume`
///
/// # Errors
///
/// If there is no node, it refuses, or stdout can't be written.
pub async fn volume(context: &Context, volume: Volume) -> Result<Outcome> {
    let client = context.client()?;
    match volume {
        Volume::Create {
            name,
            size,
            raw,
            format,
        } => {
            let wanted = api::MakeVolume {
                size_mib: size,
                raw,
            };
            let path = format!("/v1/volumes/{}", encoded(&name));
            let made: api::Volume = client.post_json(&path, &wanted).await?;
            match format {
                Some(_) => show_json(&made)?,
                None => show(&format!("{name}\n"))?,
            }
            Ok(Outcome::Done)
        }
        Volume::Resize { name, size, format } => {
            let wanted = api::ResizeVolume { size_mib: size };
            let path = format!("/v1/volumes/{}/resize", encoded(&name));
            let resized: api::ResizedVolume = client.post_json(&path, &wanted).await?;
            match format {
                Some(_) => show_json(&resized)?,
                None => show(&format!("{name}\n"))?,
            }
            if let Some(note) = &resized.note {
                report(note, None);
            }
            Ok(Outcome::Done)
        }
        Volume::Ls { format } => {
            let volumes: Vec<api::Volume> = client.get("/v1/volumes").await?;
            if format == ListFormat::Json {
                show_json(&volumes)?;
            } else {
                let mut table = Table::new(["NAME", "SIZE", "ON DISK", "BELONGS TO", "USED BY"]);
                for volume in &volumes {
                    table.row([
                        volume.name.clone(),
                        size(volume.size_mib.saturating_mul(1 << 20)),
                        size(volume.disk_bytes),
                        volume.attached_to.join(", "),
                        volume.used_by.join(", "),
                    ]);
                }
                show(&table.to_string())?;
                report_all(volumes.iter().filter_map(|it| it.error.as_deref()));
            }
            Ok(Outcome::Done)
        }
        Volume::Rm { names } => {
            each(&names, async |name| {
                client
                    .delete(&format!("/v1/volumes/{}", encoded(name)))
                    .await?;
                show(&format!("{name}\n"))
            })
            .await
        }
    }
}
