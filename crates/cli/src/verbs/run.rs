//! `jiffy run` and `jiffy create`.

use super::Context;
use super::command::{command, stdio};
use super::context::{show, show_json};
use crate::args::image::PullWhen;
use crate::args::network::NetworkOptions;
use crate::args::{
    CommandOptions, Create, JsonFormat, KernelChoice, Run, TimelineFormat, TimelineOutput,
    VmOptions,
};
use crate::client::{Client, vm_path};
use crate::failure::{Failure, Outcome, Result, report};
use crate::place::machine::shared_path;
use crate::session::{self, Captured, Leaving, Stdio};
use crate::timeline::clock::on_our_clock;
use jiffy_sys::clock::monotonic_ns;
use jiffy_wire::api::{
    CreateVm, IdlePolicy, NetworkPolicy, NetworkUse, NoCommand, RootDisk, RunVm, Vm,
};
use jiffy_wire::timeline::{Span, Timeline, Track, names};
use serde_json::json;
use std::time::Duration;

/// How long `--format json` and `--timeline=deep` wait for the VM to end after its command. Its guest
/// has 120 s to write its disks back.
const END_TIMEOUT: Duration = Duration::from_secs(150);

/// `jiffy run`
///
/// # Errors
///
/// If options exclude each other, a file can't be read, there is no node, it refuses, or the
/// session fails (see [`session::run`]).
pub async fn run(context: &Context, mut run: Run) -> Result<Outcome> {
    check_options(&run)?;
    let captured = run.format == Some(JsonFormat::Json) && !run.detach;
    let found = context.node()?;
    let client = found.client;
    let choice = ImageChoice::of(&run.vm)?;
    run.from = pulled_snapshot(&client, &run, &choice).await?;
    let stdio = stdio_of(&client, &run, captured).await?;
    let mut vm = vm_from(context, &client, run.vm).await?;
    vm.cold = run.from.is_none() && (run.cold || cold_by_environment());
    vm.from = run.from;
    vm.timeline = run.timeline.is_some();
    vm.deep = run.timeline.as_ref().is_some_and(|shown| shown.deep);
    // Without a command, the command of the image or of the snapshot runs.
    let joins_captured = vm.from.is_some() && run.argv.is_empty();
    vm.command = (!joins_captured).then(|| command(run.argv, run.command, stdio));
    vm.no_command = match run.detach {
        true => NoCommand::Wait,
        false => NoCommand::Shell,
    };
    choice.pull_first(&client, &vm).await?;
    let published = publish(context, &client, &vm).await?;
    let request = RunVm {
        vm,
        detach: run.detach,
        wait_s: run.time.wait,
    };
    let waiting = match run.quiet {
        true => client.clone(),
        false => client.with_places(),
    };
    if run.detach {
        let vm = with_image(&client, &request.vm, &choice, async || {
            waiting.post_json::<_, Vm>("/v1/run", &request).await
        })
        .await;
        if published {
            context.forward_ports_after(&client, None).await;
        }
        return detached(&vm?, run.format);
    }
    let mut sent_ns = monotonic_ns();
    let upgraded = with_image(&client, &request.vm, &choice, async || {
        sent_ns = monotonic_ns();
        waiting.upgrade("/v1/run", Some(&request)).await
    })
    .await?;
    let id = upgraded.vm.clone();
    if published {
        // The ports of -P are known only now; and while the VM waited for room or for its image,
        // another command may have closed those that were forwarded before.
        context.forward_ports_after(&client, None).await;
    }
    let mut output = Captured::default();
    let capture = captured.then_some(&mut output);
    let result = session::run(&client, upgraded, stdio, Leaving::EndsVm, capture).await;
    let delivered_ns = monotonic_ns();

    let Some(id) = id else { return result };
    // From here on a failure does not change how the command ended.
    let mut timeline = None;
    if let Some(shown) = &run.timeline {
        let own = own_spans(context.began_ns, found.machine_start, sent_ns, delivered_ns);
        // After the detach keys the VM keeps running.
        if shown.deep && !matches!(result, Ok(Outcome::Done)) {
            // The VMM reports at its end what its threads did.
            let _ = ended(&client, &id).await;
        }
        match merged(&client, &id, own).await {
            Ok(merged) => timeline = Some((shown, merged)),
            Err(failure) => failure.report(),
        }
    }
    if published {
        // A VM that keeps running keeps its ports.
        let over = matches!(result, Ok(Outcome::Ended(_))).then_some(id.as_str());
        context.forward_ports_after(&client, over).await;
    }
    let shown = finish(&client, &id, captured.then_some(&output), timeline, &result).await;
    shown.and(result)
}

/// The name of the snapshot that the VM begins from, if it does, which is pulled if it has to be.
async fn pulled_snapshot(
    client: &Client,
    run: &Run,
    choice: &ImageChoice,
) -> Result<Option<String>> {
    let Some(from) = &run.from else {
        return Ok(None);
    };
    let key = choice.key.as_deref();
    let snapshot = super::image::snapshot(client, from, run.vm.pull, key);
    snapshot.await.map(Some)
}

/// What this command did: until its request or the machine's start, that start, and the end.
fn own_spans(
    began_ns: u64,
    machine_start: Option<Span>,
    sent_ns: u64,
    delivered_ns: u64,
) -> Vec<Span> {
    let started_ns = machine_start.as_ref().map_or(sent_ns, |span| span.start_ns);
    let start = Span::new(Track::Cli, names::CLI_START, began_ns, started_ns);
    let mut spans = vec![start];
    spans.extend(machine_start);
    spans.push(Span::moment(
        Track::Cli,
        names::ANSWER_DELIVERED,
        delivered_ns,
    ));
    spans
}

/// Refuses options that would have no effect, before a node is started for them.
fn check_options(run: &Run) -> Result<()> {
    if let Some(shown) = &run.timeline
        && run.detach
        && (shown.file.is_some() || shown.format != TimelineFormat::Table)
    {
        return Err(Failure::new(
            "with --detach the timeline is recorded but not written: `jiffy timeline VM` shows it",
        )
        .hint("write --timeline or --timeline=deep, without a format or a file"));
    }
    let joins_captured = run.from.is_some() && run.argv.is_empty();
    let CommandOptions { env, workdir, user } = &run.command;
    let given = [
        (!env.is_empty(), "--env"),
        (workdir.is_some(), "--workdir"),
        (user.is_some(), "--user"),
    ];
    match given.iter().find(|(given, _)| *given && joins_captured) {
        Some((_, option)) => Err(Failure::new(format!(
            "{option} has no effect on the command of a snapshot, which runs already"
        ))
        .hint("give a command, which replaces it")),
        None => Ok(()),
    }
}

/// How the command is connected. `captured`: its output is collected for JSON.
async fn stdio_of(client: &Client, run: &Run, captured: bool) -> Result<Stdio> {
    // Whether the command of a snapshot runs on a terminal was decided at its start.
    let joins = match &run.from {
        Some(name) if run.argv.is_empty() && !run.detach => Some(joined(client, name).await?),
        _ => None,
    };
    if run.stdio.tty && joins == Some(false) {
        return Err(Failure::new(
            "--tty has no effect: the command of the snapshot runs without a terminal",
        )
        .hint("give a command, which replaces it"));
    }
    Ok(match (run.detach, captured) {
        // For a later `jiffy attach`.
        (true, _) => Stdio {
            stdin: run.stdio.interactive,
            tty: run.stdio.tty,
        },
        // There is no terminal.
        (_, true) => Stdio {
            stdin: run.stdio.interactive || !session::on_terminal(),
            tty: false,
        },
        _ => {
            let found = stdio(&run.stdio);
            Stdio {
                tty: found.tty && joins != Some(false),
                ..found
            }
        }
    })
}

/// Forwards the ports of a new VM to the machine before the VM is created, so that a port that this
/// host can't provide refuses the VM. Returns whether the VM publishes any.
async fn publish(context: &Context, client: &Client, vm: &CreateVm) -> Result<bool> {
    let network = &vm.network;
    let asked = !network.ports.is_empty() || network.publish_all;
    if asked {
        context.forward_ports(client, &network.ports).await?;
    }
    Ok(asked)
}

/// Whether the command that a snapshot holds runs on a terminal.
async fn joined(client: &Client, name: &str) -> Result<bool> {
    let snapshot = super::snapshot::get(client, name).await?;
    if snapshot.command.is_some() {
        return Ok(snapshot.tty);
    }
    Err(Failure::new(format!(
        "no command was running when the snapshot {name} was created"
    ))
    .hint("give a command, or use --detach and then `jiffy exec`"))
}

/// Whether `JIFFY_COLD=1` is set.
fn cold_by_environment() -> bool {
    std::env::var_os("JIFFY_COLD").is_some_and(|value| !value.is_empty() && value != "0")
}

/// Prints the id of a VM that was started.
fn detached(vm: &Vm, format: Option<JsonFormat>) -> Result<Outcome> {
    for warning in &vm.warnings {
        report(warning, None);
    }
    show_vm(vm, format)
        .map_err(|failure| failure.hint(format!("the VM {} keeps running", vm.id)))?;
    Ok(Outcome::Done)
}

/// How the image was chosen.
struct ImageChoice {
    /// When to pull it.
    pull: PullWhen,
    /// Whether it was the first word, which may have been meant as a program.
    is_a_word: bool,
    /// The option with the image as its value, if that may have been meant.
    meant_as_value: Option<String>,
    /// The public key that must have signed it, PEM.
    key: Option<String>,
}

impl ImageChoice {
    fn of(options: &VmOptions) -> Result<ImageChoice> {
        let key = options.verify_key.as_deref().map(super::image::pem);
        if key.is_some() && options.pull == PullWhen::Never {
            return Err(
                Failure::new("--verify-key needs the image's registry").hint("remove --pull never")
            );
        }
        Ok(ImageChoice {
            pull: options.pull,
            is_a_word: options.image_is_a_word,
            meant_as_value: options.meant_as_value.clone(),
            key: key.transpose()?,
        })
    }

    /// The failure to find this image, with a hint if it was a word that may not have been meant as
    /// the image.
    fn explain(&self, failure: Failure, image: &str) -> Failure {
        if let Some(option) = &self.meant_as_value {
            return failure.hint(format!(
                "the first word is the image; if it is the value of the option before it, write `{option}`"
            ));
        }
        let is_word = self.is_a_word && !image.contains(['/', ':', '@']);
        match is_word && failure.is_not_found() {
            true => failure.hint(format!(
                "the first word is the image; to run a command in the image base, write `jiffy run -- {image} …`"
            )),
            false => failure,
        }
    }

    /// With `--pull always`, pulls the image; with a key, has the node verify its signature.
    async fn pull_first(&self, client: &Client, vm: &CreateVm) -> Result<()> {
        // A snapshot's signature was verified when its name was looked up.
        if self.key.is_some() && vm.image.is_none() && vm.from.is_none() {
            return Err(Failure::new(
                "--verify-key needs an image or a snapshot of a registry",
            ));
        }
        let always = self.pull == PullWhen::Always;
        if let Some(image) = &vm.image
            && (always || self.key.is_some())
        {
            super::image::fetch(client, image, always, self.key.as_deref()).await?;
        }
        Ok(())
    }
}

/// Sends the request for a VM. If its image is missing, pulls it and sends the request
/// again.
async fn with_image<T>(
    client: &Client,
    request: &CreateVm,
    choice: &ImageChoice,
    mut ask: impl AsyncFnMut() -> Result<T>,
) -> Result<T> {
    let failure = match ask().await {
        Ok(answer) => return Ok(answer),
        Err(failure) => failure,
    };
    let Some(image) = request.image.as_ref().filter(|_| failure.is_about_a_name()) else {
        return Err(failure);
    };
    // The network or a volume may be what is missing.
    if !super::image::is_missing(client, image).await {
        return Err(failure);
    }
    if choice.pull == PullWhen::Never || !failure.is_not_found() {
        return Err(choice.explain(failure, image));
    }
    match super::image::pull_missing(client, image).await {
        Ok(true) => ask().await,
        Ok(false) => Err(choice.explain(failure, image)),
        Err(failure) if choice.meant_as_value.is_some() => Err(choice.explain(failure, image)),
        Err(failure) => Err(failure),
    }
}

/// `jiffy create`
///
/// # Errors
///
/// If a file can't be read, there is no node, it refuses, or stdout can't be written.
pub async fn create(context: &Context, create: Create) -> Result<Outcome> {
    let client = context.client()?;
    let stdio = Stdio {
        stdin: create.interactive,
        tty: create.tty,
    };
    let choice = ImageChoice::of(&create.vm)?;
    let mut vm = vm_from(context, &client, create.vm).await?;
    vm.command = Some(command(create.argv, create.command, stdio));
    vm.no_command = NoCommand::Wait;
    choice.pull_first(&client, &vm).await?;
    let vm: Vm = with_image(&client, &vm, &choice, async || {
        client.post_json("/v1/vms", &vm).await
    })
    .await?;
    show_vm(&vm, create.format)?;
    Ok(Outcome::Done)
}

fn show_vm(vm: &Vm, format: Option<JsonFormat>) -> Result<()> {
    match format {
        Some(JsonFormat::Json) => show_json(vm),
        None => show(&format!("{}\n", vm.id)),
    }
}

/// The size of a VM's memory, MiB, as the API has it.
///
/// # Errors
///
/// If it does not fit in 32 bits.
pub fn memory_mib(size: Option<u64>) -> Result<Option<u32>> {
    let checked = size.map(|size| {
        u32::try_from(size)
            .map_err(|_| Failure::new(format!("a VM can't have {size} MiB of memory")))
    });
    checked.transpose()
}

/// Builds the request; uploads the user's kernel first.
async fn vm_from(context: &Context, client: &Client, options: VmOptions) -> Result<CreateVm> {
    let mut folders = [options.folder, options.mount].concat();
    if context.in_machine() {
        for folder in &mut folders {
            folder.source = shared_path(&context.folders, &folder.source, folder.read_only)?;
        }
    }
    let kernel = match options.kernel {
        Some(KernelChoice::File(file)) => Some(super::kernel::upload(client, &file).await?),
        Some(KernelChoice::Name(name)) => Some(match super::kernel::built(&name) {
            Some(file) => super::kernel::upload(client, &file).await?,
            None => name,
        }),
        None => None,
    };
    let (memory, max_memory) = (memory_mib(options.memory)?, memory_mib(options.max_memory)?);
    Ok(CreateVm {
        name: options.name,
        registry: options
            .image
            .as_ref()
            .and_then(|_| super::image::default_registry()),
        image: options.image,
        entrypoint: options
            .entrypoint
            .map(|program| Vec::from_iter((!program.is_empty()).then_some(program))),
        kernel,
        cpus: options.cpus,
        max_cpus: options.max_cpus,
        memory_mib: memory,
        max_memory_mib: max_memory,
        pages: options.huge_pages.map(Into::into).unwrap_or_default(),
        disks: options.disk,
        folders,
        root_disk: match (options.root_disk, options.root_copy) {
            (Some(size_mib), _) => Some(RootDisk::Layer { size_mib }),
            (None, true) => Some(RootDisk::Copy {
                plainly: options.copy,
            }),
            (None, false) => None,
        },
        root_limit: options.root_limit.unwrap_or_default(),
        init: options.init.map(|program| vec![program]),
        console: options.console,
        remove: options.rm,
        hostname: options.hostname,
        cpu_profile: options
            .cpu_profile
            .as_deref()
            .map(crate::cpu::wanted)
            .transpose()?,
        kernel_args: (!options.kernel_arg.is_empty()).then(|| options.kernel_arg.join(" ")),
        network: network_of(options.network),
        idle: options.idle.map(|after_s| IdlePolicy {
            after_s,
            action: options.idle_action.into(),
        }),
        owner: options.owner,
        priority: options.priority.into(),
        ..CreateVm::default()
    })
}

fn network_of(options: NetworkOptions) -> NetworkUse {
    NetworkUse {
        proxy_ports: options.ports_of_the_proxy(),
        limit: options.network_limit.unwrap_or_default(),
        name: options.network,
        ports: options.publish,
        publish_all: options.publish_all,
        policy: NetworkPolicy {
            allow: options.allow,
            deny: options.deny,
        },
        dns: options.dns,
        search: options.dns_search,
        hosts: options.add_host,
    }
}

/// The node's spans of this VM and those of this process, on one clock.
async fn merged(client: &Client, id: &str, own: Vec<Span>) -> Result<Timeline> {
    let timeline: Timeline = client.get(&vm_path(id, "/timeline")).await?;
    let mut timeline = on_our_clock(client, timeline).await?;
    timeline.spans.extend(own);
    timeline.sort();
    Ok(timeline)
}

/// The VM once it has ended; `None` if that takes too long, also for the user.
async fn ended(client: &Client, id: &str) -> Option<Vm> {
    let path = vm_path(id, "/wait");
    tokio::select! {
        biased;
        () = session::asked_to_end() => None,
        vm = tokio::time::timeout(END_TIMEOUT, client.post::<Vm>(&path)) => vm.ok()?.ok(),
    }
}

/// Writes the timeline and, with `--format json`, the JSON object.
async fn finish(
    client: &Client,
    id: &str,
    output: Option<&Captured>,
    timeline: Option<(&TimelineOutput, Timeline)>,
    result: &Result<Outcome>,
) -> Result<()> {
    if let Some((shown, timeline)) = &timeline
        && let Err(failure) = super::timeline::write(timeline, shown)
    {
        failure.report();
    }
    let Some(output) = output else { return Ok(()) };
    let vm = ended(client, id).await;
    let (status, error) = match result {
        Ok(Outcome::Ended(status)) => (Some(*status), None),
        Ok(Outcome::NotStarted(error)) => (None, Some(error.message.clone())),
        Ok(_) => (None, None),
        Err(failure) => (None, Some(failure.message.clone())),
    };
    let mut document = json!({
        "id": id,
        "vm": vm,
        "exit": status,
        "status": status.map(|status| status.shell_code()),
        "error": error,
    });
    for (name, value) in output.fields() {
        document[name] = value;
    }
    if let Some((_, timeline)) = &timeline {
        document["timeline"] = crate::timeline::json(timeline);
    }
    show_json(&document)
}
