//! `jiffy volume`

use super::Context;
use super::context::{show, show_json};
use super::vms::each;
use crate::args::{ListFormat, Volume};
use crate::client::encoded;
use crate::failure::{Outcome, Result};
use crate::render::{Table, size};
use jiffy_wire::api;

/// `jiffy volume`
pub async fn volume(context: &Context, volume: Volume) -> Result<Outcome> {
    let client = context.client()?;
    match volume {
        Volume::Ls { format } => {
            let volumes: Vec<api::Volume> = client.get("/v1/volumes").await?;
            if format == ListFormat::Json {
                show_json(&volumes)?;
            } else {
                let mut table = Table::new(["NAME", "SIZE", "USED BY"]);
                for volume in &volumes {
                    table.row([
                        volume.name.clone(),
                        size(volume.size_mib.saturating_mul(1 << 20)),
                        volume.used_by.join(", "),
                    ]);
                }
                show(&table.to_string())?;
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
