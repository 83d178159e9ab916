//! `jiffy ps`, `inspect`, `start`, `stop`, `kill`, `rm` and `wait`.

use super::Context;
use super::context::{each, show, show_json};
use super::exec::attach_to;
use super::run::memory_mib;
use crate::args::update::Update;
use crate::args::{Inspect, Kill, ListFormat, Ps, Rm, Start, Stop, Wait};
use crate::client::vm_path;
use crate::failure::{Failure, Outcome, Result, report_all};
use crate::render::now;
use crate::session::Leaving;
use jiffy_wire::api::{Limits, Vm, VmState};
use jiffy_wire::text::list::{self, List};

/// `jiffy ps`
///
/// # Errors
///
/// If there is no node, or stdout can't be written.
pub async fn ps(context: &Context, ps: Ps) -> Result<Outcome> {
    let client = context.client()?;
    let path = format!("/v1/vms?all={}", ps.all);
    if ps.format == ListFormat::Json {
        show_json(&newest_first(client.get(&path).await?))?;
    } else if ps.quiet {
        let vms = newest_first(client.get(&path).await?);
        let ids = vms.iter().flat_map(|vm| [vm.id.as_str(), "\n"]);
        show(&ids.collect::<String>())?;
    } else {
        let answer = client.get_as(list::MEDIA_TYPE, &path).await?;
        match answer.text(list::MEDIA_TYPE) {
            Some(text) => {
                show(text)?;
                // The list has no room for sentences. Few VMs have one, so they are asked for then.
                if text.contains(list::ERROR) {
                    explain(&client.get::<Vec<Vm>>(&path).await?);
                }
            }
            // Nodes of version 0.1 have JSON only.
            None => {
                let vms = newest_first(answer.json()?);
                show(&List::of(&vms, now()).text())?;
                explain(&vms);
            }
        }
    }
    Ok(Outcome::Done)
}

/// Reports what is wrong with VMs that have not ended.
fn explain(vms: &[Vm]) {
    let lasting = vms.iter().filter(|vm| vm.state != VmState::Exited);
    report_all(lasting.filter_map(|vm| vm.error.as_deref()));
}

/// The node's list begins with the oldest.
fn newest_first(mut vms: Vec<Vm>) -> Vec<Vm> {
    vms.reverse();
    vms
}

/// `jiffy inspect`
///
/// # Errors
///
/// If there is no node, or stdout can't be written. Other failures are as in [`each`].
pub async fn inspect(context: &Context, inspect: Inspect) -> Result<Outcome> {
    let client = context.client()?;
    let mut found: Vec<Vm> = Vec::new();
    let outcome = each(&inspect.vms, async |vm| {
        found.push(client.get(&vm_path(vm, "")).await?);
        Ok(())
    })
    .await?;
    show_json(&found)?;
    Ok(outcome)
}

/// `jiffy start`
///
/// # Errors
///
/// If there is no node, or `--attach` is given with several VMs or its session fails. Other
/// failures are as in [`each`].
pub async fn start(context: &Context, start: Start) -> Result<Outcome> {
    let client = context.client()?;
    let waiting = client.with_places();
    let order = format!("/start{}", start.wait.query());
    if start.attach {
        let [vm] = &start.vms[..] else {
            return Err(Failure::new("--attach takes only one VM"));
        };
        waiting.post::<Vm>(&vm_path(vm, &order)).await?;
        // When it was stopped, its ports were closed.
        context.forward_ports_after(&client, None).await;
        return attach_to(&client, vm, start.interactive, Leaving::LeavesIt, "").await;
    }
    let act = async |vm: &str| {
        waiting.post::<Vm>(&vm_path(vm, &order)).await?;
        show(&format!("{vm}\n"))
    };
    context.each_with_ports(&client, &start.vms, act).await
}

/// `jiffy update`
///
/// # Errors
///
/// If no limit is given, the memory is too large, or there is no node. Other failures are as in
/// [`each`].
pub async fn update(context: &Context, update: Update) -> Result<Outcome> {
    let client = context.client()?;
    let limits = Limits {
        root: update.root_limit,
        volumes: update.disk_limit.into_iter().collect(),
        network: update.network_limit,
        cpus: update.cpus,
        memory_mib: memory_mib(update.memory)?,
    };
    if limits.is_default() {
        return Err(
            Failure::new("no new limit is given").hint("`jiffy update --help` lists the limits")
        );
    }
    let order = format!("/limits{}", update.time.query());
    each(&update.vms, async |vm| {
        client
            .post_json::<_, Vm>(&vm_path(vm, &order), &limits)
            .await?;
        show(&format!("{vm}\n"))
    })
    .await
}

/// `jiffy stop`
///
/// # Errors
///
/// If there is no node. Other failures are as in [`each`].
pub async fn stop(context: &Context, stop: Stop) -> Result<Outcome> {
    let client = context.client()?;
    let grace_ms = u64::from(stop.time) * 1000;
    let act = async |vm: &str| {
        let path = vm_path(vm, &format!("/stop?grace_ms={grace_ms}"));
        client.post::<Vm>(&path).await?;
        show(&format!("{vm}\n"))
    };
    context.each_with_ports(&client, &stop.vms, act).await
}

/// `jiffy kill`
///
/// # Errors
///
/// If there is no node. Other failures are as in [`each`].
pub async fn kill(context: &Context, kill: Kill) -> Result<Outcome> {
    let client = context.client()?;
    let what = match kill.signal {
        Some(signal) => format!("/kill?signal={signal}"),
        None => "/kill".to_owned(),
    };
    let act = async |vm: &str| {
        client.post::<Vm>(&vm_path(vm, &what)).await?;
        show(&format!("{vm}\n"))
    };
    context.each_with_ports(&client, &kill.vms, act).await
}

/// `jiffy rm`
///
/// # Errors
///
/// If there is no node. Other failures are as in [`each`].
pub async fn rm(context: &Context, rm: Rm) -> Result<Outcome> {
    let client = context.client()?;
    let act = async |vm: &str| {
        match client
            .delete(&vm_path(vm, &format!("?force={}", rm.force)))
            .await
        {
            Err(failure) if rm.force && failure.is_not_found() => return Ok(()),
            result => result?,
        }
        show(&format!("{vm}\n"))
    };
    context.each_with_ports(&client, &rm.vms, act).await
}

/// `jiffy wait`
///
/// # Errors
///
/// If there is no node. Other failures are as in [`each`]; a VM that ended with an error is one.
pub async fn wait(context: &Context, wait: Wait) -> Result<Outcome> {
    let client = context.client()?;
    each(&wait.vms, async |vm| {
        let vm: Vm = client.post(&vm_path(vm, "/wait")).await?;
        match (vm.exit, vm.error) {
            (Some(exit), _) => show(&format!("{}\n", exit.shell_code())),
            (None, Some(error)) => Err(Failure::new(format!("{} failed: {error}", vm.name))),
            (None, None) => show("0\n"),
        }
    })
    .await
}
