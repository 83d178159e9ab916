//! `jiffy kernel`

use super::Context;
use super::context::{show, show_json};
use crate::args::{Kernel, ListFormat};
use crate::client::{BodySender, Client, encoded};
use crate::failure::{Failure, Outcome, Result, report, report_all};
use crate::place;
use crate::render::{Table, size};
use hyper::Method;
use indicatif::{ProgressBar, ProgressStyle};
use jiffy_kernel::build::{BuildError, Progress};
use jiffy_kernel::check::{Need, Purpose, Report, State, boot_problem};
use jiffy_kernel::config::Config;
use jiffy_kernel::image::{Format, Image, ImageError};
use jiffy_kernel::list::{Flavour, Kernels, Origin, UnknownFlavour, cache_folder};
use jiffy_wire::api::KernelInfo;
use serde_json::json;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Largest kernel file, bytes.
const MAX_KERNEL: u64 = 512 << 20;
/// Digits of a digest in the name of an uploaded kernel.
const NAME_DIGITS: usize = 32;

/// `jiffy kernel`
///
/// # Errors
///
/// If a file or the node's list can't be read, or the build fails. An unsuitable kernel is no error
/// of `check`.
pub fn kernel(context: &Context, kernel: Kernel) -> Result<Outcome> {
    match kernel {
        Kernel::List { format } => context.block_on(|| list(context, format)),
        Kernel::Check {
            file,
            docker,
            format,
        } => check(&file, docker, format),
        Kernel::Build { variant } => build(context, &variant),
    }
}

/// Lists kernels of the node, if it runs, and of this user's cache. Starts no node.
async fn list(context: &Context, format: ListFormat) -> Result<Outcome> {
    let node: Option<Vec<KernelInfo>> =
        match place::find_running(context.machine, &context.folders)? {
            Some(client) => Some(client.get("/v1/kernels").await?),
            None => None,
        };
    let built = built_kernels()?;
    for broken in &built.broken {
        report(
            &format!(
                "{} is not a kernel: {}",
                broken.folder.display(),
                broken.problem
            ),
            None,
        );
    }
    if format == ListFormat::Json {
        show_json(&json!({ "node": node, "built": built.kernels }))?;
        return Ok(Outcome::Done);
    }
    let mut table = Table::new(["NAME", "WHERE", "SIZE", "RELEASE", "DIGEST"]);
    for kernel in node.iter().flatten() {
        table.row([
            kernel.name.clone(),
            "node".to_owned(),
            size(kernel.size),
            "-".to_owned(),
            kernel.digest.chars().take(12).collect(),
        ]);
    }
    for kernel in &built.kernels {
        table.row([
            kernel.name.clone(),
            "built here".to_owned(),
            size(kernel.bytes),
            kernel.release.clone(),
            "-".to_owned(),
        ]);
    }
    show(&table.to_string())?;
    let kernels = node.iter().flatten();
    report_all(kernels.filter_map(|it| it.error.as_deref()));
    Ok(Outcome::Done)
}

/// The kernels in this user's cache.
fn built_kernels() -> Result<Kernels> {
    let Some(cache) = cache_folder() else {
        return Ok(Kernels::default());
    };
    jiffy_kernel::list::list(&[(Origin::Cache, &cache)])
        .map_err(|error| Failure::io(error.to_string(), error.source))
}

/// The file of a kernel in this user's cache: the one with this name, or the newest of this
/// flavour. `base` is the one that the node came with.
pub fn built(name: &str) -> Option<PathBuf> {
    let built = built_kernels().ok()?;
    let newest = || match name.parse() {
        Ok(Flavour::Base) | Err(_) => None,
        Ok(flavour) => built.newest(flavour),
    };
    let by_name = built.kernels.iter().find(|kernel| kernel.name == name);
    Some(by_name.or_else(newest)?.vmlinux.clone())
}

/// A kernel or a configuration that was read.
enum Checked {
    Image(Image),
    Config(Config),
}

impl Checked {
    fn read(file: &Path) -> Result<Checked> {
        match Image::open(file) {
            Ok(image) => return Ok(Checked::Image(image)),
            Err(ImageError::Unknown { .. }) => {}
            Err(ImageError::Read { source, .. }) => {
                return Err(Failure::io(
                    format_args!("{} can't be read", file.display()),
                    source,
                ));
            }
            Err(error) => return Err(Failure::new(error.to_string())),
        }
        let text = fs::read(file).map_err(|error| {
            Failure::io(format_args!("{} can't be read", file.display()), error)
        })?;
        let neither = |why: String| {
            Failure::new(format!(
                "{} is neither a kernel image nor a configuration: {why}",
                file.display()
            ))
        };
        let text =
            std::str::from_utf8(&text).map_err(|_| neither("it is not UTF-8 text".into()))?;
        Config::parse(text)
            .map(Checked::Config)
            .map_err(|error| neither(error.to_string()))
    }
}

/// Lists what a kernel lacks.
fn check(file: &Path, docker: bool, format: ListFormat) -> Result<Outcome> {
    let purpose = match docker {
        true => Purpose::Docker,
        false => Purpose::Guest,
    };
    let checked = Checked::read(file)?;
    let (kind, problem, config) = match &checked {
        Checked::Config(config) => ("configuration", None, Ok(config)),
        Checked::Image(image) => {
            let kind = match image.format {
                Format::Elf { .. } => "ELF image",
                Format::BzImage { .. } => "bzImage",
            };
            (kind, boot_problem(image), image.config.as_ref())
        }
    };
    let found = config.map(|config| jiffy_kernel::check::check(config, purpose));
    let bootable = problem.is_none() && found.as_ref().map_or(true, |found| found.boots());
    if format == ListFormat::Json {
        show_json(&json!({
            "file": file,
            "kind": kind,
            "boots": bootable,
            "problem": problem,
            "config": found.as_ref().ok(),
            "config_problem": found.as_ref().err().map(ToString::to_string),
        }))?;
    } else {
        let mut text = format!("{}: {kind}\n", file.display());
        if let Some(problem) = problem {
            text.push_str(&format!("✗ it does not boot: {problem}\n"));
        }
        match &found {
            Ok(found) => text.push_str(&describe(found)),
            Err(why) => text.push_str(&format!("– its options could not be checked: {why}\n")),
        }
        show(&text)?;
    }
    Ok(Outcome::Verdict(u8::from(!bootable)))
}

fn describe(found: &Report) -> String {
    if found.findings.is_empty() {
        return format!("✓ it has all {} options that were checked\n", found.checked);
    }
    let mut table = Table::new(["OPTION", "NEED", "STATE", "FOR"]);
    for finding in &found.findings {
        let need = match finding.need {
            Need::Needed => "needed",
            Need::Recommended => "recommended",
            Need::Docker => "docker",
        };
        let state = match finding.state {
            State::Missing => "missing",
            State::Module => "a module",
        };
        table.row([
            finding.option.clone(),
            need.to_owned(),
            state.to_owned(),
            finding.why.to_owned(),
        ]);
    }
    let mark = match found.boots() {
        true => "✓ guests boot with it",
        false => "✗ guests do not boot with it",
    };
    format!("{table}{mark}\n")
}

/// Builds a kernel on this host.
fn build(context: &Context, variant: &str) -> Result<Outcome> {
    let flavour: Flavour = variant
        .parse()
        .map_err(|error: UnknownFlavour| Failure::new(error.to_string()))?;
    let path = built_now(context, flavour)?;
    show(&format!("{}\n", path.display()))?;
    Ok(Outcome::Done)
}

/// The file of a kernel, which is built unless it was before.
///
/// # Errors
///
/// If there is no build script, or it fails.
pub fn built_now(context: &Context, flavour: Flavour) -> Result<PathBuf> {
    let folder = context.folders.share.join("kernel");
    if !folder.join("build").exists() {
        return Err(Failure::new(format!(
            "there is no kernel build script in {}",
            folder.display()
        ))
        .hint("install all of Jiffy (`make install`), or set JIFFY_SHARE"));
    }
    let bar = ProgressBar::new(0);
    let on_terminal = !bar.is_hidden();
    if let Ok(style) = ProgressStyle::with_template("  {msg} {bar:30} {pos} of {len} {elapsed}") {
        bar.set_style(style);
    }
    let built = jiffy_kernel::build::build(&folder, flavour, &mut |progress| match progress {
        Progress::Step(step) if on_terminal => bar.set_message(step),
        Progress::Step(step) => eprintln!("jiffy: kernel: {step}"),
        Progress::Objects { done, total } => {
            bar.set_length(total);
            bar.set_position(done);
        }
    });
    bar.finish_and_clear();
    match built {
        Ok(path) => Ok(path),
        Err(BuildError::Run { script, source }) => Err(Failure::io(
            format_args!("{} can't run", script.display()),
            source,
        )),
        Err(error) => {
            if let BuildError::Failed { details, .. } = &error {
                for line in details {
                    eprintln!("{line}");
                }
            }
            Err(Failure::new(error.to_string()))
        }
    }
}

/// Uploads a kernel file unless the node has it. Returns its name on the node.
///
/// # Errors
///
/// If the file can't be read or is not a kernel, or the node refuses it.
pub async fn upload(client: &Client, file: &Path) -> Result<String> {
    let failed = |error| {
        Failure::io(
            format_args!("the kernel {} can't be read", file.display()),
            error,
        )
    };
    let facts = fs::metadata(file).map_err(failed)?;
    if !facts.is_file() || facts.len() > MAX_KERNEL {
        return Err(
            Failure::new(format!("{} is not a kernel image", file.display())).hint(
                "give a vmlinux with a PVH note or a bzImage; `jiffy kernel check` says what is missing",
            ),
        );
    }
    let bytes = fs::read(file).map_err(failed)?;
    let digest = blake3::hash(&bytes).to_hex();
    let known: Vec<KernelInfo> = client.get("/v1/kernels").await?;
    if let Some(kernel) = known.iter().find(|kernel| kernel.digest == digest.as_str()) {
        return Ok(kernel.name.clone());
    }
    let name = &digest[..NAME_DIGITS];
    let (mut sender, body) = BodySender::new();
    std::thread::spawn(move || {
        let result = sender.write_all(&bytes);
        sender.finish(result);
    });
    let path = format!("/v1/kernels/{}", encoded(name));
    let kernel: KernelInfo = client.upload(Method::PUT, &path, body).await?;
    Ok(kernel.name)
}
