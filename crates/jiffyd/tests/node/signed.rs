//! Signature rules for pulls and starts.

use crate::daemon::{Daemon, command, named, tar_of, vm};
use crate::images::{by_name, encoded, pull, push, steps};
use crate::pulls::{kept, with};
use crate::registry::Registry;
use jiffy_registry::signature::{PrivateKey, sign};
use jiffy_registry::{Client, ClientOptions, Digest, Reference};
use jiffy_wire::agent::ExitStatus;
use jiffy_wire::api::{
    ApiError, CreateVm, ErrorKind, PullImage, PullStep, RegistryAccess, VmState,
};
use serde_json::json;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

/// An OpenSSL key, and its public half in PEM.
fn key(folder: &Path) -> (PrivateKey, String) {
    let openssl = |arguments: &[&str]| {
        let output = Command::new("openssl").args(arguments).output().unwrap();
        assert!(output.status.success());
        output.stdout
    };
    let kind = ["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"];
    let private = openssl(&[&["genpkey"], &kind[..]].concat());
    let path = folder.join("key");
    fs::write(&path, &private).unwrap();
    let public = openssl(&["pkey", "-pubout", "-in", path.to_str().unwrap()]);
    (
        PrivateKey::from_pem(&private).unwrap(),
        String::from_utf8(public).unwrap(),
    )
}

#[test]
fn only_images_signed_with_the_key_are_pulled() {
    let registry = Registry::start();
    let daemon = Daemon::start();
    let folder = tempfile::tempdir().unwrap();
    let digest: Digest = registry
        .put("web:1", &[("a", b"b")], json!({}))
        .parse()
        .unwrap();
    let name = registry.name("web:1");
    let (ours, public) = key(folder.path());
    let (others, _) = key(folder.path());
    let client = Client::new(ClientOptions::default()).unwrap();
    let reference = Reference::parse(&name, None).unwrap();
    let wanted = with(
        RegistryAccess {
            verify_key: Some(public),
            ..RegistryAccess::default()
        },
        &name,
    );
    for what in ["it has no signature", "by other keys"] {
        let error = pull(&daemon, &wanted).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Invalid);
        assert!(error.message.contains(what), "{}", error.message);
        assert_eq!(kept(&daemon), BTreeSet::new());
        sign(&client, &reference, &digest, &others, &()).unwrap();
    }
    let nonsense = with(
        RegistryAccess {
            verify_key: Some("no key".into()),
            ..RegistryAccess::default()
        },
        &name,
    );
    let error = pull(&daemon, &nonsense).unwrap_err();
    assert!(error.message.contains("key"), "{}", error.message);
    sign(&client, &reference, &digest, &ours, &()).unwrap();
    pull(&daemon, &wanted).unwrap();
    // A local image is checked against the key, too, whatever the tag is now.
    let kept_as_it_is = PullImage {
        renew: false,
        ..wanted.clone()
    };
    pull(&daemon, &kept_as_it_is).unwrap();
    registry.put("web:1", &[("a", b"c")], json!({}));
    pull(&daemon, &kept_as_it_is).unwrap();
    pull(&daemon, &by_name(&registry.name("web:1"))).unwrap();
    let error = pull(&daemon, &kept_as_it_is).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid);
    assert!(
        error.message.contains("it has no signature"),
        "{}",
        error.message
    );
}

/// A VM of this image, or the error.
fn run(daemon: &Daemon, image: &str) -> Result<(), ApiError> {
    let wanted = CreateVm {
        image: Some(image.into()),
        remove: true,
        ..vm(command(&["true"]))
    };
    run_of(daemon, wanted)
}

fn run_of(daemon: &Daemon, wanted: CreateVm) -> Result<(), ApiError> {
    match daemon.try_run(wanted) {
        Ok(frames) => {
            assert_eq!(frames.finish().status(), ExitStatus::Code(0));
            Ok(())
        }
        Err(answer) => Err(serde_json::from_slice(&answer.body).unwrap()),
    }
}

fn refused(what: Result<(), ApiError>, why: &str) {
    let error = what.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid, "{error:?}");
    assert!(error.message.contains(why), "{}", error.message);
    let hint = error.hint.unwrap();
    assert!(hint.contains("--signed"), "{hint}");
}

#[test]
fn a_signature_rule_holds_for_pulls_and_starts() {
    let registry = Registry::start();
    let mut daemon = Daemon::start();
    let folder = tempfile::tempdir().unwrap();
    let digest: Digest = registry
        .put("team/web:1", &[("a", b"b")], json!({}))
        .parse()
        .unwrap();
    registry.put("free:1", &[("a", b"b")], json!({}));
    let (web, free) = (registry.name("team/web:1"), registry.name("free:1"));
    let (ours, public) = key(folder.path());
    let (others, another) = key(folder.path());
    let path = |name: &str| folder.path().join(name);
    fs::write(path("ours.pub"), &public).unwrap();
    fs::write(path("others.pub"), another).unwrap();
    let rule = |place: String, key: &str| format!("--signed={place}={}", path(key).display());
    // The image is pulled and used by a VM before there is a rule.
    pull(&daemon, &by_name(&web)).unwrap();
    let old = CreateVm {
        image: Some(web.clone()),
        ..vm(command(&["true"]))
    };
    assert_eq!(daemon.create(&named("old", old)).status, 200);
    let ours_only = rule(registry.name("team"), "ours.pub");
    daemon.restart_with(&[&ours_only]);
    let before = kept(&daemon);
    let start = |daemon: &Daemon| {
        let answer = daemon.post("/v1/vms/old/start", b"");
        match answer.status {
            200 | 204 => Ok(()),
            _ => Err(serde_json::from_slice(&answer.body).unwrap()),
        }
    };
    let unknown = "has no verified signature";
    refused(run(&daemon, &web), unknown);
    refused(start(&daemon), unknown);
    let as_it_is = PullImage {
        renew: false,
        ..by_name(&web)
    };
    let fetch = |daemon: &Daemon, wanted: &PullImage| pull(daemon, wanted).map(drop);
    let client = Client::new(ClientOptions::default()).unwrap();
    let reference = Reference::parse(&web, None).unwrap();
    for why in ["it has no signature", "by other keys"] {
        refused(fetch(&daemon, &as_it_is), why);
        refused(fetch(&daemon, &by_name(&web)), why);
        sign(&client, &reference, &digest, &others, &()).unwrap();
    }
    refused(run(&daemon, &web), unknown);
    assert_eq!(kept(&daemon), before);
    // Images of other places are not affected; a local name proves nothing.
    pull(&daemon, &by_name(&free)).unwrap();
    run(&daemon, &free).unwrap();
    run(&daemon, "base").unwrap();
    let own = registry.name("team/own:1");
    let import = format!("/v1/images/{}", encoded(&own));
    let answer = daemon.post(&import, &tar_of(&[("a", b"c")]));
    assert_eq!(answer.status, 200);
    refused(run(&daemon, &own), unknown);

    sign(&client, &reference, &digest, &ours, &()).unwrap();
    refused(run(&daemon, &web), unknown);
    pull(&daemon, &as_it_is).unwrap();
    run(&daemon, &web).unwrap();
    start(&daemon).unwrap();
    daemon.when("old", VmState::Exited);
    // Another key for the same place, and one for all others.
    let either = rule(registry.name("team"), "others.pub");
    let all = rule("*".into(), "others.pub");
    daemon.restart_with(&[&either, &all]);
    refused(run(&daemon, &web), unknown);
    refused(run(&daemon, &free), unknown);
    daemon.restart_with(&[&ours_only, &either, &all]);
    // A verified image needs no registry.
    drop(registry);
    run(&daemon, &web).unwrap();
    pull(&daemon, &as_it_is).unwrap();
}

#[test]
fn a_signature_rule_holds_for_restores() {
    let registry = Registry::start();
    let mut daemon = Daemon::start();
    let folder = tempfile::tempdir().unwrap();
    let (ours, public) = key(folder.path());
    let path = folder.path().join("ours.pub");
    fs::write(&path, public).unwrap();
    let sleeps = daemon.run_captured(vm(command(&["/bin/sleep", "1000"])));
    let name = registry.name("box:1");
    let (digest, ..) = push(&daemon, "ready", &name).unwrap();
    drop(sleeps);
    let fetch = |daemon: &Daemon, renew: bool| {
        let wanted = PullImage {
            renew,
            ..by_name(&name)
        };
        let wanted = serde_json::to_vec(&wanted).unwrap();
        match steps(&daemon.post("/v1/pulls", &wanted)).pop().unwrap() {
            PullStep::PulledSnapshot { .. } => Ok(()),
            PullStep::Failed(error) => Err(error),
            step => panic!("{step:?}"),
        }
    };
    let restore = |daemon: &Daemon| {
        let from = CreateVm {
            from: Some(name.clone()),
            ..CreateVm::default()
        };
        let answer = daemon.run_detached(named("again", from));
        let path = "/v1/vms/again?force=true";
        match answer.status {
            200 | 201 => {
                daemon.delete(path);
                Ok(())
            }
            _ => Err(serde_json::from_slice(&answer.body).unwrap()),
        }
    };
    fetch(&daemon, true).unwrap();
    restore(&daemon).unwrap();
    let rule = format!("--signed={}={}", registry.host, path.display());
    daemon.restart_with(&[&rule]);
    refused(restore(&daemon), "has no verified signature");
    refused(fetch(&daemon, false), "it has no signature");
    refused(fetch(&daemon, true), "it has no signature");
    let client = Client::new(ClientOptions::default()).unwrap();
    let reference = Reference::parse(&name, None).unwrap();
    sign(&client, &reference, &digest.parse().unwrap(), &ours, &()).unwrap();
    fetch(&daemon, true).unwrap();
    restore(&daemon).unwrap();
}
