//! Images, registries, and what goes to and comes from them.

use super::{JsonFormat, ListFormat};
use clap::{Args, Subcommand, ValueEnum, ValueHint};
use std::path::PathBuf;

/// `jiffy image`
#[derive(Debug, Subcommand)]
pub enum Image {
    /// Fetch an image from a registry
    Pull(Pull),
    /// Make an image from a folder, a tar, an OCI layout or what `docker save`
    /// writes
    Import(Import),
    /// Make an image of a distribution, with mmdebstrap
    Build(Build),
    /// List images
    Ls {
        /// Names only
        #[arg(short, long, conflicts_with = "format")]
        quiet: bool,
        /// How to show it
        #[arg(long, value_enum, default_value = "table")]
        format: ListFormat,
    },
    /// Show all about images, as JSON
    Inspect {
        /// Their names
        #[arg(required = true, value_name = "IMAGE")]
        names: Vec<String>,
    },
    /// Remove images
    Rm {
        /// Their names
        #[arg(required = true, value_name = "IMAGE")]
        names: Vec<String>,
    },
    /// Remove images that can be pulled again and that no VM needs
    Prune {
        /// Output: their names, or json
        #[arg(long, value_enum, value_name = "FORMAT")]
        format: Option<JsonFormat>,
    },
}

/// `jiffy image import`
#[derive(Debug, Args)]
pub struct Import {
    /// Of a source that has several images: the one of this name or tag
    #[arg(long = "ref", value_name = "NAME")]
    pub reference: Option<String>,
    /// Output: the name, or json
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: Option<JsonFormat>,
    /// The name it gets
    pub name: String,
    /// A folder, a file or - for stdin; files may be packed with gzip, zstd or
    /// xz
    #[arg(value_name = "FOLDER|FILE|-", value_hint = ValueHint::AnyPath)]
    pub source: PathBuf,
}

/// `jiffy image build`
#[derive(Debug, Args)]
#[command(
    after_long_help = "mmdebstrap runs on this host, without privileges where the \
host allows that. It takes packages from where this host's own apt does, unless --mirror says."
)]
pub struct Build {
    /// The suite: bookworm, trixie, unstable
    #[arg(long, value_name = "SUITE")]
    pub debian: String,
    /// Further packages. Repeatable; also a list with commas
    #[arg(long, value_name = "PKG", value_delimiter = ',')]
    pub include: Vec<String>,
    /// Where packages come from: a URL or a line of sources.list
    #[arg(long, value_name = "MIRROR")]
    pub mirror: Option<String>,
    /// How much of the suite: essential, apt, minbase, standard, …
    #[arg(long, value_name = "VARIANT", default_value = "minbase")]
    pub variant: String,
    /// Output: the name, or json
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: Option<JsonFormat>,
    /// The name it gets
    pub name: String,
}

/// When to ask the registry.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum PullWhen {
    /// Each time, also when an image of that name is here
    Always,
    /// If there is no image of that name here
    #[default]
    Missing,
    /// Never
    Never,
}

/// How a registry is spoken to.
#[derive(Debug, Default, Args)]
pub struct RegistryOptions {
    /// Who you are there; without it, what `docker login` and `podman login`
    /// have left
    #[arg(long, value_name = "USER[:PASSWORD]")]
    pub creds: Option<String>,
    /// Read the password from stdin
    #[arg(long, requires = "creds")]
    pub password_stdin: bool,
    /// Speak HTTP without TLS, also beyond this host
    #[arg(long)]
    pub plain_http: bool,
    /// Trust the certificates in this file, too
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub ca: Option<PathBuf>,
}

/// `jiffy image pull`
#[derive(Debug, Args)]
pub struct Pull {
    /// Which of several images: linux/amd64, linux/arm64
    #[arg(long, value_name = "OS/ARCH")]
    pub platform: Option<String>,
    #[command(flatten)]
    pub registry: RegistryOptions,
    /// Take only what this public key has signed (as cosign does: ECDSA on
    /// P-256, PEM)
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub verify_key: Option<PathBuf>,
    /// Output: the name, or json
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: Option<JsonFormat>,
    /// HOST/REPO:TAG, HOST/REPO@DIGEST; without a host, of the registry that
    /// JIFFY_REGISTRY names
    #[arg(value_name = "REF")]
    pub reference: String,
}

/// `jiffy push`
#[derive(Debug, Args)]
pub struct Push {
    /// NAME is a snapshot, even if there is an image of that name
    #[arg(long)]
    pub snapshot: bool,
    #[command(flatten)]
    pub registry: RegistryOptions,
    /// Output: the manifest's digest, or json
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: Option<JsonFormat>,
    /// An image or a snapshot
    #[arg(value_name = "NAME")]
    pub name: String,
    /// HOST/REPO:TAG; without a host, of the registry that JIFFY_REGISTRY names
    #[arg(value_name = "REF")]
    pub reference: String,
}

/// `jiffy commit`
#[derive(Debug, Args)]
pub struct Commit {
    /// Output: the image's name, or json
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: Option<JsonFormat>,
    /// Its name, id or the beginning of its id
    #[arg(value_name = "VM")]
    pub vm: String,
    /// The name that the image gets
    #[arg(value_name = "IMAGE")]
    pub image: String,
}
