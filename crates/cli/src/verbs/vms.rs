//! The verbs that look at VMs or change their state.

use super::Context;
use super::context::{show, show_json};
use crate::args::{Inspect, Kill, ListFormat, Ps, Rm, Start, Stop, Wait};
use crate::client::{Client, encoded};
use crate::failure::{Failure, Outcome, Result};
use crate::render::{Table, age, now, size};
use jiffy_wire::api::{Origin, Vm, VmState};
use jiffy_wire::summary::VmSummary;
use std::borrow::Cow;

/// `jiffy ps`
pub async fn ps(context: &Context, ps: Ps) -> Result<Outcome> {
    let client = context.client()?;
    if ps.format == ListFormat::Json {
        let mut vms: Vec<Vm> = client.get(&format!("/v1/vms?all={}", ps.all)).await?;
        vms.sort_by(|a, b| b.created.cmp(&a.created).then_with(|| a.name.cmp(&b.name)));
        show_json(&vms)?;
        return Ok(Outcome::Done);
    }
    let answer = client.list(&format!("/v1/vms?all={}", ps.all)).await?;
    let mut vms: Vec<VmSummary<'_>> = answer.read()?;
    vms.sort_by(|a, b| b.created.cmp(&a.created).then_with(|| a.name.cmp(&b.name)));
    match ps.quiet {
        true => {
            let ids = vms.iter().flat_map(|vm| [vm.id.as_ref(), "\n"]);
            show(&ids.collect::<String>())?;
        }
        false => show(&table(&vms).to_string())?,
    }
    Ok(Outcome::Done)
}

fn table(vms: &[VmSummary<'_>]) -> Table<10> {
    let now = now();
    let mut table = Table::new([
        "ID", "NAME", "IMAGE", "KERNEL", "CPUS", "MEMORY", "COMMAND", "CREATED", "STATUS", "ORIGIN",
    ]);
    // Most of many VMs have the same.
    let mut memory = (0, String::new());
    for vm in vms {
        if memory.0 != vm.memory_mib {
            memory = (vm.memory_mib, size(u64::from(vm.memory_mib) << 20));
        }
        table.row([
            Cow::Borrowed(vm.id.as_ref()),
            Cow::Borrowed(vm.name.as_ref()),
            Cow::Borrowed(vm.image.as_ref()),
            Cow::Borrowed(vm.kernel.as_ref()),
            Cow::Owned(vm.cpus.to_string()),
            Cow::Borrowed(memory.1.as_str()),
            command(vm.command.as_deref()),
            Cow::Owned(age(vm.created, now) + " ago"),
            Cow::Owned(status(vm, now)),
            origin(vm),
        ]);
    }
    table
}

/// Longest command shown in the list, in characters.
const MAX_COMMAND: usize = 32;

/// A command, cut short.
pub fn command(argv: Option<&[String]>) -> Cow<'static, str> {
    let Some(argv) = argv else {
        return Cow::Borrowed("-");
    };
    let line = argv.join(" ");
    match line.char_indices().nth(MAX_COMMAND) {
        Some(_) => line.chars().take(MAX_COMMAND - 1).chain(['…']).collect(),
        None => Cow::Owned(line),
    }
}

/// Where its memory came from. A golden snapshot is as good as a boot.
fn origin(vm: &VmSummary<'_>) -> Cow<'static, str> {
    match vm.origin.as_deref() {
        Some(Origin::From(name)) => Cow::Owned(["from ", name].concat()),
        Some(Origin::ForkedFrom(name)) => Cow::Owned(["forked from ", name].concat()),
        Some(Origin::Golden) | None => Cow::Borrowed(""),
    }
}

fn status(vm: &VmSummary<'_>, now: u64) -> String {
    let since = |time: Option<u64>| age(time.unwrap_or(vm.created), now);
    // Of a VM that has ended the status says so anyway.
    let trouble = match (&vm.error, vm.state) {
        (None, _) | (_, VmState::Exited) => "",
        (Some(_), _) => " (error)",
    };
    let status = match vm.state {
        VmState::Created => "Created".to_owned(),
        VmState::Starting => "Starting".to_owned(),
        VmState::Running => "Up ".to_owned() + &since(vm.started),
        VmState::Paused => format!("Up {} (paused)", since(vm.started)),
        VmState::Stopping => "Stopping".to_owned(),
        VmState::Hibernated => format!("Hibernated {} ago", since(vm.ended)),
        VmState::Exited => {
            let how = match (&vm.exit, &vm.error) {
                (Some(exit), _) => format!("Exited ({})", exit.shell_code()),
                (None, Some(_)) => "Failed".to_owned(),
                (None, None) => "Ended".to_owned(),
            };
            format!("{how} {} ago", since(vm.ended))
        }
    };
    status + trouble
}

/// `jiffy inspect`
pub async fn inspect(context: &Context, inspect: Inspect) -> Result<Outcome> {
    let client = context.client()?;
    let mut found: Vec<Vm> = Vec::new();
    let mut outcome = Outcome::Done;
    for vm in &inspect.vms {
        match client.get(&path(vm, "")).await {
            Ok(vm) => found.push(vm),
            Err(failure) => {
                failure.report();
                outcome = Outcome::Partly;
            }
        }
    }
    show_json(&found)?;
    Ok(outcome)
}

/// `jiffy start`
pub async fn start(context: &Context, start: Start) -> Result<Outcome> {
    let client = context.client()?;
    if start.attach {
        let [vm] = &start.vms[..] else {
            return Err(Failure::new("only one VM can be started and attached to"));
        };
        client.post::<Vm>(&path(vm, "/start")).await?;
        return super::exec::attach_to(&client, vm, start.interactive).await;
    }
    each(&start.vms, async |vm| {
        client.post::<Vm>(&path(vm, "/start")).await?;
        show(&format!("{vm}\n"))
    })
    .await
}

/// `jiffy stop`
pub async fn stop(context: &Context, stop: Stop) -> Result<Outcome> {
    let client = context.client()?;
    let grace_ms = u64::from(stop.time) * 1000;
    each(&stop.vms, async |vm| {
        let path = path(vm, &format!("/stop?grace_ms={grace_ms}"));
        client.post::<Vm>(&path).await?;
        show(&format!("{vm}\n"))
    })
    .await
}

/// `jiffy kill`
pub async fn kill(context: &Context, kill: Kill) -> Result<Outcome> {
    let client = context.client()?;
    let what = match kill.signal {
        Some(signal) => format!("/kill?signal={signal}"),
        None => "/kill".to_owned(),
    };
    each(&kill.vms, async |vm| {
        client.post::<Vm>(&path(vm, &what)).await?;
        show(&format!("{vm}\n"))
    })
    .await
}

/// `jiffy rm`
pub async fn rm(context: &Context, rm: Rm) -> Result<Outcome> {
    let client = context.client()?;
    each(&rm.vms, async |vm| {
        match client
            .delete(&path(vm, &format!("?force={}", rm.force)))
            .await
        {
            Err(failure) if rm.force && failure.is_not_found() => return Ok(()),
            result => result?,
        }
        show(&format!("{vm}\n"))
    })
    .await
}

/// `jiffy wait`
pub async fn wait(context: &Context, wait: Wait) -> Result<Outcome> {
    let client = context.client()?;
    each(&wait.vms, async |vm| {
        let vm: Vm = client.post(&path(vm, "/wait")).await?;
        match (vm.exit, vm.error) {
            (Some(exit), _) => show(&format!("{}\n", exit.shell_code())),
            (None, Some(error)) => Err(Failure::new(format!("{} failed: {error}", vm.name))),
            (None, None) => show("0\n"),
        }
    })
    .await
}

/// Does it to each; failures are reported, and the rest is still done.
pub async fn each(
    names: &[String],
    mut act: impl AsyncFnMut(&str) -> Result<()>,
) -> Result<Outcome> {
    let mut outcome = Outcome::Done;
    for name in names {
        match act(name).await {
            Ok(()) => {}
            Err(failure) if failure.kind == crate::failure::Kind::BrokenPipe => {
                return Err(failure);
            }
            Err(failure) => {
                failure.report();
                outcome = Outcome::Partly;
            }
        }
    }
    Ok(outcome)
}

/// The path of a VM in the API, and what comes after it.
pub fn path(vm: &str, rest: &str) -> String {
    format!("/v1/vms/{}{rest}", encoded(vm))
}

/// What a VM is now; for callers that only have its name.
pub async fn get(client: &Client, vm: &str) -> Result<Vm> {
    client.get(&path(vm, "")).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_wire::agent::ExitStatus;

    fn vm(state: VmState) -> Vm {
        serde_json::from_value(serde_json::json!({
            "id": "0123456789ab", "name": "web", "state": state, "image": "base",
            "kernel": "base", "cpus": 1, "memory_mib": 128,
            "command": ["sh", "-c", "while true; do echo a very long command; done"],
            "disks": [], "created": 100, "started": 160, "ended": null, "pid": null, "cid": 3,
            "exit": null, "error": null, "remove": false
        }))
        .unwrap()
    }

    fn told(vm: &Vm) -> String {
        status(&VmSummary::of(vm), 220)
    }

    #[test]
    fn a_status_says_since_when() {
        assert_eq!(told(&vm(VmState::Running)), "Up 1 minute");
        assert_eq!(told(&vm(VmState::Paused)), "Up 1 minute (paused)");
        let mut asleep = vm(VmState::Hibernated);
        asleep.ended = Some(215);
        assert_eq!(told(&asleep), "Hibernated 5 seconds ago");
        let mut unheard = vm(VmState::Running);
        unheard.error = Some("its guest can't be heard".into());
        assert_eq!(told(&unheard), "Up 1 minute (error)");
        let mut ended = vm(VmState::Exited);
        ended.ended = Some(215);
        assert_eq!(told(&ended), "Ended 5 seconds ago");
        ended.error = Some("it broke".into());
        assert_eq!(told(&ended), "Failed 5 seconds ago");
        ended.exit = Some(ExitStatus::Signal(9));
        assert_eq!(told(&ended), "Exited (137) 5 seconds ago");
    }

    #[test]
    fn a_long_command_is_cut() {
        let shown = command(vm(VmState::Running).command.as_deref());
        assert_eq!(shown, "sh -c while true; do echo a ver…");
        assert_eq!(shown.chars().count(), MAX_COMMAND);
    }
}
