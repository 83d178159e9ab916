//! The verbs, one file each, or one file for several small ones.

mod bench;
mod command;
mod completions;
mod context;
mod cp;
mod disk;
mod doctor;
mod events;
mod exec;
mod image;
mod kernel;
mod logs;
mod machine;
mod network;
mod output_file;
mod ports;
mod queue;
mod run;
mod sched;
mod snapshot;
mod ssh;
mod timeline;
mod version;
mod vms;
mod volume;

pub use context::{Context, show};
pub use ssh::{SshVerb, ssh_main};

use crate::args::{Cli, Later, Verb};
use crate::failure::{Outcome, Result, conclude};

/// The program: parses the command line, executes it and exits.
pub fn main() -> ! {
    let began_ns = jiffy_sys::clock::monotonic_ns();
    let cli = Cli::of_this_process();
    exit(perform(cli, began_ns))
}

/// Reports a failure and ends this process.
fn exit(result: Result<Outcome>) -> ! {
    crate::session::restore();
    std::process::exit(conclude(result).into())
}

fn perform(cli: Cli, began_ns: u64) -> Result<Outcome> {
    let context = Context::new(cli.machine, began_ns);
    match cli.verb {
        Verb::Run(Later(run)) => context.block_on(|| run::run(&context, run)),
        Verb::Create(Later(create)) => context.block_on(|| run::create(&context, create)),
        Verb::Start(Later(start)) => context.block_on(|| vms::start(&context, start)),
        Verb::Exec(Later(exec)) => context.block_on(|| exec::exec(&context, exec)),
        Verb::Ps(Later(ps)) => context.block_on(|| vms::ps(&context, ps)),
        Verb::Logs(Later(logs)) => context.block_on(|| logs::logs(&context, logs)),
        Verb::Cp(Later(cp)) => context.block_on(|| cp::cp(&context, cp)),
        Verb::Queue(Later(queue)) => context.block_on(|| queue::queue(&context, queue)),
        Verb::Events(Later(events)) => context.block_on(|| events::events(&context, events)),
        Verb::Inspect(Later(inspect)) => context.block_on(|| vms::inspect(&context, inspect)),
        Verb::Stop(Later(stop)) => context.block_on(|| vms::stop(&context, stop)),
        Verb::Kill(Later(kill)) => context.block_on(|| vms::kill(&context, kill)),
        Verb::Rm(Later(rm)) => context.block_on(|| vms::rm(&context, rm)),
        Verb::Wait(Later(wait)) => context.block_on(|| vms::wait(&context, wait)),
        Verb::Attach(Later(attach)) => context.block_on(|| exec::attach(&context, attach)),
        Verb::Update(Later(update)) => context.block_on(|| vms::update(&context, update)),
        Verb::Pause(Later(vms)) => context.block_on(|| snapshot::order(&context, vms, "pause")),
        Verb::Resume(Later(vms)) => context.block_on(|| snapshot::order(&context, vms, "resume")),
        Verb::Wake(Later(wake)) => context.block_on(|| snapshot::wake(&context, wake)),
        Verb::Fork(Later(fork)) => context.block_on(|| snapshot::fork(&context, fork)),
        Verb::Hibernate(Later(hibernate)) => {
            context.block_on(|| snapshot::hibernate(&context, hibernate))
        }
        Verb::Snapshot(Later(snapshot)) => {
            context.block_on(|| snapshot::snapshot(&context, snapshot))
        }
        Verb::Timeline(Later(timeline)) => {
            context.block_on(|| timeline::timeline(&context, timeline))
        }
        Verb::Sched(Later(sched)) => context.block_on(|| sched::sched(&context, sched)),
        Verb::Kernel(Later(kernel)) => kernel::kernel(&context, kernel),
        Verb::Image(Later(image)) => context.block_on(|| image::image(&context, image)),
        Verb::Pull(Later(pull)) => context.block_on(|| image::pull(&context, pull)),
        Verb::Push(Later(push)) => context.block_on(|| image::push(&context, push)),
        Verb::Commit(Later(commit)) => context.block_on(|| image::commit(&context, commit)),
        Verb::Volume(Later(volume)) => context.block_on(|| volume::volume(&context, volume)),
        Verb::Network(Later(network)) => context.block_on(|| network::network(&context, network)),
        Verb::Port(Later(port)) => context.block_on(|| network::port(&context, port)),
        Verb::Disk(Later(disk)) => context.block_on(|| disk::disk(&context, disk)),
        Verb::Machine(Later(machine)) => machine::machine(&context, machine),
        Verb::Doctor(Later(doctor)) => doctor::doctor(&context, doctor),
        Verb::Ssh(_) | Verb::SshConfig(_) | Verb::SshProxy(_) => ssh::ssh(&context),
        Verb::Bench(Later(bench)) => bench::bench(&context, bench),
        Verb::Version(Later(version)) => context.block_on(|| version::version(&context, version)),
        Verb::Completions(Later(completions)) => completions::completions(completions),
    }
}
