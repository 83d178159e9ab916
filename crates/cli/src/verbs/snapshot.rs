//! `jiffy snapshot`, and the verbs that pause, fork, hibernate and wake VMs.

use super::context::{each, show, show_json};
use super::{Context, output_file};
use crate::args::snapshot::{Fork, Hibernate, ShowTimeline, Snapshot, Vms, Wake};
use crate::args::{JsonFormat, ListFormat};
use crate::client::{Client, encoded, vm_path};
use crate::failure::{Failure, Outcome, Result, report_all};
use crate::render::{Table, age, command, now, size};
use crate::timeline::clock::on_our_clock;
use http_body_util::{BodyExt, Limited};
use jiffy_wire::api::{
    self, ForkVm, Forked, Hibernated, MakeSnapshot, MemoryForm, MemoryReport, Pruned, SnapshotMade,
    Vm,
};
use jiffy_wire::timeline::Timeline;
use serde_json::json;
use std::path::Path;

/// Largest picture that is accepted, bytes.
const MAX_PICTURE: usize = 256 << 20;

/// `jiffy pause` and `jiffy resume`
///
/// # Errors
///
/// If there is no node. Other failures are as in [`each`].
pub async fn order(context: &Context, vms: Vms, order: &str) -> Result<Outcome> {
    let client = context.client()?;
    post_each(&client, &vms.vms, &format!("/{order}")).await
}

/// `jiffy wake`
///
/// # Errors
///
/// If there is no node. Other failures are as in [`each`].
pub async fn wake(context: &Context, wake: Wake) -> Result<Outcome> {
    let client = context.client()?;
    let outcome = post_each(
        &client.with_places(),
        &wake.vms,
        &format!("/wake{}", wake.wait.query()),
    )
    .await;
    context.forward_ports_after(&client, None).await;
    outcome
}

async fn post_each(client: &Client, vms: &[String], order: &str) -> Result<Outcome> {
    each(vms, async |vm| {
        client.post::<Vm>(&vm_path(vm, order)).await?;
        show(&format!("{vm}\n"))
    })
    .await
}

/// `jiffy hibernate`
///
/// # Errors
///
/// If several timelines would go to one file, or there is no node. Other failures are as in
/// [`each`].
pub async fn hibernate(context: &Context, hibernate: Hibernate) -> Result<Outcome> {
    let wanted = hibernate.show.timeline.as_ref();
    if hibernate.vms.len() > 1
        && let Some(file) = wanted.and_then(|wanted| wanted.file.as_ref())
    {
        return Err(Failure::new(format!(
            "the timelines of several VMs don't fit into the file {}",
            file.display()
        ))
        .hint("hibernate one VM at a time, or leave out the file: stderr has all of them"));
    }
    let client = context.client()?;
    each(&hibernate.vms, async |vm| {
        let slept: Hibernated = client.post(&vm_path(vm, "/hibernate")).await?;
        show(&format!("{vm}\n"))?;
        show_timeline(&client, slept.timeline, &hibernate.show).await
    })
    .await
}

/// `jiffy fork`
///
/// # Errors
///
/// If there is no node, it refuses, or stdout or the timeline can't be written.
pub async fn fork(context: &Context, fork: Fork) -> Result<Outcome> {
    let client = context.client()?;
    let wanted = ForkVm {
        count: fork.count,
        name: fork.name,
        priority: fork.wait.priority.map(Into::into),
        wait_s: fork.wait.time.wait,
    };
    let forked: Forked = client
        .with_places()
        .post_json(&vm_path(&fork.vm, "/fork"), &wanted)
        .await?;
    match fork.format {
        Some(JsonFormat::Json) => show_json(&forked)?,
        None => {
            let names = forked.vms.iter().map(|vm| format!("{}\n", vm.name));
            show(&names.collect::<String>())?;
        }
    }
    show_timeline(&client, forked.timeline, &fork.show).await?;
    Ok(Outcome::Done)
}

/// `jiffy snapshot`
///
/// # Errors
///
/// If there is no node, it refuses, or stdout or a file can't be written.
pub async fn snapshot(context: &Context, snapshot: Snapshot) -> Result<Outcome> {
    let client = context.client()?;
    match snapshot {
        Snapshot::Create {
            stop,
            show: show_on,
            format,
            vm,
            name,
        } => {
            let wanted = MakeSnapshot { name, stop };
            let made: SnapshotMade = client
                .post_json(&vm_path(&vm, "/snapshots"), &wanted)
                .await?;
            match format {
                Some(JsonFormat::Json) => show_json(&made)?,
                None => show(&format!("{}\n", made.snapshot.name))?,
            }
            show_timeline(&client, made.timeline, &show_on).await?;
            Ok(Outcome::Done)
        }
        Snapshot::Ls { all, format } => list(&client, all, format).await,
        Snapshot::Rm { names } => {
            each(&names, async |name| {
                // A snapshot that can't be read can still be removed.
                let kept = get(&client, name).await.ok().and_then(kept_for);
                client.delete(&snapshot_path(name, "")).await?;
                if let Some(kept) = kept {
                    eprintln!("jiffy: {kept}");
                }
                show(&format!("{name}\n"))
            })
            .await
        }
        Snapshot::Inspect {
            summary: _,
            map,
            png,
            format,
            name,
        } => match png {
            Some(file) => picture(&client, &name, &file).await,
            None => inspect(&client, &name, map, format).await,
        },
        Snapshot::Prune { format } => prune(&client, format).await,
        Snapshot::Optimise { names } => {
            each(&names, async |name| {
                client
                    .post::<api::Snapshot>(&snapshot_path(name, "/optimise"))
                    .await?;
                show(&format!("{name}\n"))
            })
            .await
        }
    }
}

/// Gets a snapshot, for `jiffy run --from`.
///
/// # Errors
///
/// If the node can't be reached, or has no such snapshot.
pub async fn get(client: &Client, name: &str) -> Result<api::Snapshot> {
    client.get(&snapshot_path(name, "")).await
}

fn snapshot_path(name: &str, rest: &str) -> String {
    format!("/v1/snapshots/{}{rest}", encoded(name))
}

async fn show_timeline(client: &Client, timeline: Timeline, wanted: &ShowTimeline) -> Result<()> {
    let Some(wanted) = &wanted.timeline else {
        return Ok(());
    };
    let mut timeline = on_our_clock(client, timeline).await?;
    timeline.sort();
    super::timeline::write(&timeline, wanted)
}

async fn list(client: &Client, all: bool, format: ListFormat) -> Result<Outcome> {
    let snapshots: Vec<api::Snapshot> = client.get(&format!("/v1/snapshots?all={all}")).await?;
    if format == ListFormat::Json {
        show_json(&snapshots)?;
        return Ok(Outcome::Done);
    }
    let now = now();
    let mut table = Table::new([
        "NAME", "VM", "IMAGE", "MEMORY", "ON DISK", "COMMAND", "CREATED", "USED BY",
    ]);
    for snapshot in &snapshots {
        table.row([
            snapshot.name.clone(),
            match snapshot.golden {
                true => "-".to_owned(),
                false => snapshot.vm.clone(),
            },
            snapshot.image.clone(),
            size(u64::from(snapshot.memory_mib) << 20),
            size(snapshot.memory_bytes.saturating_add(snapshot.other_bytes)),
            command(snapshot.command.as_deref()),
            format!("{} ago", age(snapshot.created, now)),
            snapshot.used_by.join(", "),
        ]);
    }
    show(&table.to_string())?;
    report_all(snapshots.iter().filter_map(|it| it.error.as_deref()));
    Ok(Outcome::Done)
}

async fn inspect(client: &Client, name: &str, map: bool, format: ListFormat) -> Result<Outcome> {
    let snapshot = get(client, name).await?;
    let report: MemoryReport = client
        .get(&snapshot_path(name, &format!("/memory?map={map}")))
        .await?;
    match (format, map) {
        (ListFormat::Json, _) => show_json(&json!({"snapshot": snapshot, "memory": report}))?,
        (ListFormat::Table, true) => show(&map_of(&report))?,
        (ListFormat::Table, false) => show(&summary(&snapshot, &report))?,
    }
    Ok(Outcome::Done)
}

/// A note about the data that stays on disk for other snapshots after a removal.
fn kept_for(snapshot: api::Snapshot) -> Option<String> {
    let children = snapshot.children.join(", ");
    (!children.is_empty()).then(|| {
        format!(
            "{} of memory of the snapshot {} stay on disk, because other snapshots are built on it: {children}",
            size(snapshot.memory_bytes),
            snapshot.name
        )
    })
}

fn summary(snapshot: &api::Snapshot, report: &MemoryReport) -> String {
    let mut facts = Table::new(["SNAPSHOT", &snapshot.name]);
    let mut fact = |name: &str, value: String| facts.row([name.to_owned(), value]);
    fact("VM", snapshot.vm.clone());
    if let Some(parent) = &snapshot.parent {
        fact("parent", parent.clone());
    }
    fact("image", short(&snapshot.image, &snapshot.image_digest));
    fact("kernel", short(&snapshot.kernel, &snapshot.kernel_digest));
    fact(
        "shape",
        format!(
            "{} vCPUs, {}",
            snapshot.cpus,
            size(u64::from(snapshot.memory_mib) << 20)
        ),
    );
    fact("command", command(snapshot.command.as_deref()));
    for volume in &snapshot.volumes {
        fact("volume", volume.name.clone());
    }
    fact(
        "memory",
        match (snapshot.memory, snapshot.optimised) {
            (MemoryForm::Raw, _) => "sparse file, mapped".to_owned(),
            (MemoryForm::Image, false) => format!("chunks of {}", size(report.chunk_bytes)),
            (MemoryForm::Image, true) => {
                format!("chunks of {}, working set first", size(report.chunk_bytes))
            }
        },
    );
    fact(
        "on disk",
        format!(
            "{} ({} of memory, {} of its tables), {}",
            size(snapshot.memory_bytes.saturating_add(snapshot.other_bytes)),
            size(report.file_bytes),
            size(report.metadata_bytes),
            ratio(report.size, report.file_bytes),
        ),
    );
    if snapshot.shared_bytes > 0 {
        fact(
            "built on",
            format!("{} of earlier snapshots", size(snapshot.shared_bytes)),
        );
    }
    if !snapshot.children.is_empty() {
        fact("built on it", snapshot.children.join(", "));
    }
    fact(
        "table load time",
        format!("{:.3} ms", report.load_ns as f64 / 1e6),
    );
    let mut kinds = Table::new(["KIND", "CHUNKS", "MEMORY", "STORED", "RATIO"]);
    for kind in &report.kinds {
        kinds.row([
            kind.kind.clone(),
            kind.chunks.to_string(),
            size(kind.bytes),
            size(kind.stored_bytes),
            ratio(kind.bytes, kind.stored_bytes),
        ]);
    }
    format!("{facts}\n{kinds}")
}

fn short(name: &str, digest: &str) -> String {
    let digest: String = digest.chars().take(12).collect();
    format!("{name} ({digest})")
}

/// A ratio such as `4.2:1`; `-` if nothing is stored.
fn ratio(bytes: u64, stored: u64) -> String {
    match stored {
        0 => "-".to_owned(),
        stored => format!("{:.1}:1", bytes as f64 / stored as f64),
    }
}

fn map_of(report: &MemoryReport) -> String {
    let mut table = Table::new(["FROM", "TO", "LENGTH", "KIND", "STORED"]);
    for range in &report.ranges {
        let end = range.offset.saturating_add(range.length);
        table.row([
            format!("{:#012x}", range.offset),
            format!("{end:#012x}"),
            size(range.length),
            range.kind.clone(),
            size(range.stored_bytes),
        ]);
    }
    table.to_string()
}

async fn picture(client: &Client, name: &str, file: &Path) -> Result<Outcome> {
    let body = client.stream(&snapshot_path(name, "/picture")).await?;
    let picture = Limited::new(body, MAX_PICTURE)
        .collect()
        .await
        .map_err(|_| Failure::new("the connection was lost before the picture was complete"))?
        .to_bytes();
    output_file::write("the picture", file, &picture)?;
    Ok(Outcome::Done)
}

async fn prune(client: &Client, format: Option<JsonFormat>) -> Result<Outcome> {
    let pruned: Pruned = client.post("/v1/snapshots/prune").await?;
    match format {
        Some(JsonFormat::Json) => show_json(&pruned)?,
        None => {
            let mut text: String = pruned
                .names
                .iter()
                .map(|name| format!("{name}\n"))
                .collect();
            text.push_str(&format!("freed {}\n", size(pruned.bytes)));
            show(&text)?;
        }
    }
    Ok(Outcome::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_to_zero_stored_bytes_is_a_dash() {
        assert_eq!(ratio(100, 0), "-");
        assert_eq!(ratio(100, 40), "2.5:1");
    }

    #[test]
    fn a_map_has_a_row_for_each_range() {
        let report = MemoryReport {
            ranges: vec![api::ChunkRange {
                offset: 0x2000,
                length: 8192,
                kind: "zstd".into(),
                stored_bytes: 700,
            }],
            ..MemoryReport::default()
        };
        let map = map_of(&report);
        assert!(
            map.contains("0x0000002000   0x0000004000   8.0 KiB   zstd   700 B"),
            "{map}"
        );
    }
}
