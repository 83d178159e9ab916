use super::*;
use clap::CommandFactory;
use std::ffi::OsString;
use std::num::NonZeroU64;

fn parse(line: &str) -> Cli {
    let words: Vec<OsString> = line.split_whitespace().map(Into::into).collect();
    Cli::of(&words).unwrap()
}

fn refuse(line: &str) -> String {
    Cli::try_parse_from(line.split_whitespace())
        .unwrap_err()
        .to_string()
}

fn run(line: &str) -> Run {
    match parse(line).verb {
        Verb::Run(Later(run)) => run,
        other => panic!("not a run: {other:?}"),
    }
}

#[test]
fn the_clap_definitions_are_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn verbs_have_the_names_that_users_of_docker_expect() {
    assert!(matches!(parse("jiffy unpause box").verb, Verb::Resume(_)));
    let listed = parse("jiffy kernel ls").verb;
    assert!(format!("{listed:?}").contains("List"), "{listed:?}");
}

#[test]
fn the_examples_of_run_are_in_one_column() {
    let mut run = Cli::command();
    run.build();
    let run = run.find_subcommand_mut("run").unwrap();
    let help = run.render_long_help().to_string();
    assert!(help.contains("\n  jiffy run -- CMD"), "{help}");
}

#[test]
fn the_command_begins_at_the_first_non_option_word() {
    let with_dashes = run("jiffy run --name box -e A=1 -- date -u");
    let without = run("jiffy run --name box -e A=1 --image web date -u");
    assert_eq!(with_dashes.argv, ["date", "-u"]);
    assert_eq!(without.argv, ["date", "-u"]);
    assert_eq!(without.vm.name.as_deref(), Some("box"));
    assert!(run("jiffy run -it").argv.is_empty());
}

#[test]
fn the_first_word_is_the_image_unless_dashes_stand_before_it() {
    let of = |line: &str| {
        let run = run(line);
        (run.vm.image.unwrap_or_default(), run.argv.join(" "))
    };
    let pair = |image: &str, argv: &str| (image.to_owned(), argv.to_owned());
    assert_eq!(of("jiffy run -- date"), pair("", "date"));
    assert_eq!(of("jiffy run --rm -- debian date"), pair("", "debian date"));
    assert_eq!(of("jiffy run debian"), pair("debian", ""));
    assert_eq!(of("jiffy run debian date -u"), pair("debian", "date -u"));
    assert_eq!(of("jiffy run debian -- date -u"), pair("debian", "date -u"));
    assert_eq!(
        of("jiffy run debian sh -c -- ls"),
        pair("debian", "sh -c -- ls")
    );
    assert_eq!(of("jiffy run --rm debian -- -- x"), pair("debian", "-- x"));
    assert_eq!(of("jiffy run --image web date"), pair("web", "date"));
    assert_eq!(of("jiffy run --image web -- date"), pair("web", "date"));
    assert_eq!(of("jiffy run --from one date"), pair("", "date"));
    assert_eq!(of("jiffy run --from one -- date"), pair("", "date"));
    let Verb::Create(Later(create)) = parse("jiffy create --name x h/web:1 serve").verb else {
        panic!()
    };
    assert_eq!(create.vm.image.as_deref(), Some("h/web:1"));
    assert_eq!(create.argv, ["serve"]);
}

#[test]
fn registry_options_are_parsed() {
    let Verb::Pull(Later(pull)) = parse(
        "jiffy pull --creds me:secret --plain-http --ca /ca.pem --platform linux/arm64 h/a:1",
    )
    .verb
    else {
        panic!()
    };
    assert_eq!(pull.registry.creds.as_deref(), Some("me:secret"));
    assert!(pull.registry.plain_http && pull.registry.ca.is_some());
    assert!(refuse("jiffy pull --password-stdin h/a").contains("--creds"));
    let Verb::Image(Later(image::Image::Build(build))) =
        parse("jiffy image build --debian trixie --include a,b --include c box").verb
    else {
        panic!()
    };
    assert_eq!(build.include, ["a", "b", "c"]);
    assert_eq!(build.variant, "minbase");
    assert!(refuse("jiffy image build box").contains("--debian"));
    assert!(refuse("jiffy push web").contains("REF"));
    assert!(refuse("jiffy commit box").contains("IMAGE"));
    assert_eq!(
        run("jiffy run --pull never a").vm.pull,
        image::PullWhen::Never
    );
}

#[test]
fn options_of_run_are_parsed() {
    let run = run(
        "jiffy run -it --rm --cpus 4 --memory 2G --kernel ./vmlinux --image debian \
         --disk data:1G --disk logs:ro --console --init --hostname h --kernel-arg quiet \
         --kernel-arg=-x --huge-pages --timeline=json:/tmp/t.json -w /srv -u 1:2 true",
    );
    assert!(run.stdio.interactive && run.stdio.tty && run.vm.rm && run.vm.console);
    assert_eq!(run.vm.cpus, Some(4));
    assert_eq!(run.vm.memory, Some(2048));
    assert_eq!(run.vm.kernel, Some(KernelChoice::File("./vmlinux".into())));
    assert_eq!(run.vm.disk[0].size_mib, Some(1024));
    assert!(run.vm.disk[1].read_only && run.vm.disk[1].size_mib.is_none());
    assert_eq!(run.vm.init.as_deref(), Some("/sbin/init"));
    assert_eq!(run.vm.kernel_arg, ["quiet", "-x"]);
    assert_eq!(run.vm.huge_pages, Some(HugePages::M2));
    assert_eq!(
        run.timeline,
        Some(TimelineOutput {
            format: TimelineFormat::Json,
            file: Some("/tmp/t.json".into()),
            deep: false,
        })
    );
    assert_eq!(run.argv, ["true"]);
}

#[test]
fn optional_values_need_an_equals_sign() {
    let run = run("jiffy run --timeline -- date");
    assert_eq!(run.argv, ["date"]);
    assert_eq!(run.timeline.unwrap().format, TimelineFormat::Table);
}

#[test]
fn a_timeline_in_detail_is_a_table_or_a_file_for_perfetto() {
    let shown = |option: &str| {
        run(&format!("jiffy run {option} -- date"))
            .timeline
            .unwrap()
    };
    let table = shown("--timeline=deep");
    assert_eq!(
        (table.format, table.file, table.deep),
        (TimelineFormat::Table, None, true)
    );
    let file = shown("--timeline=deep:a:b.json");
    assert_eq!(file.format, TimelineFormat::Perfetto);
    assert_eq!(file.file, Some("a:b.json".into()));
    assert!(!shown("--timeline=json").deep);
    assert!(refuse("jiffy run --timeline=deep: -- date").contains("names no file"));
    // Only a run starts a VM whose activity can be recorded.
    assert!(refuse("jiffy fork box --timeline=deep").contains("not a format"));
}

#[test]
fn an_idle_time_has_a_unit() {
    for (text, seconds) in [
        ("90", 90),
        ("90s", 90),
        ("5m", 300),
        ("2h", 7200),
        ("1d", 86_400),
    ] {
        let run = run(&format!("jiffy run --idle {text} --idle-action stop true"));
        assert_eq!(run.vm.idle, Some(seconds), "{text}");
        assert_eq!(run.vm.idle_action, IdleActionChoice::Stop);
    }
    assert_eq!(run("jiffy run true").vm.idle, None);
    for text in ["m", "1w", "+1", "1.5h", "99999999d"] {
        assert!(
            refuse(&format!("jiffy run --idle {text} true")).contains("5m"),
            "{text}"
        );
    }
    assert!(refuse("jiffy run --idle-action stop true").contains("--idle"));
}

#[test]
fn ports_of_the_proxy_are_a_list_none_or_all() {
    let ports = |text: &str| {
        let run = run(&format!("jiffy run {text} true"));
        run.vm.network.ports_of_the_proxy()
    };
    assert_eq!(ports(""), None);
    let all = Some(vec!["1-65535".to_owned()]);
    assert_eq!(ports("--proxy-ports all"), all);
    assert_eq!(ports("--proxy-ports none"), Some(Vec::new()));
    let list = ["3000", "8000-8100"].map(str::to_owned);
    assert_eq!(ports("--proxy-ports 3000,8000-8100"), Some(list.into()));
}

#[test]
fn contradictions_are_refused() {
    assert!(refuse("jiffy run -t -T true").contains("cannot be used with"));
    assert!(refuse("jiffy run --cpus 33 true").contains("33"));
    assert!(refuse("jiffy run --memory lots true").contains("256M"));
    assert!(refuse("jiffy exec box").contains("CMD"));
    assert!(refuse("jiffy kill -s NOPE box").contains("NOPE"));
    assert!(refuse("jiffy timeline").contains("VM"));
    assert!(refuse("jiffy sched trace --seconds 61").contains("61"));
    assert!(refuse("jiffy sched trace --seconds 0").contains("1..=60"));
}

#[test]
fn a_timeline_takes_a_vm_a_format_or_an_order() {
    let Verb::Timeline(Later(plain)) = parse("jiffy timeline box --format perfetto").verb else {
        panic!()
    };
    assert_eq!(plain.vm.as_deref(), Some("box"));
    assert_eq!(plain.format, TimelineFormat::Perfetto);
    let Verb::Timeline(Later(blame)) = parse("jiffy timeline blame box").verb else {
        panic!()
    };
    assert!(matches!(blame.order, Some(TimelineOrder::Blame { vm }) if vm == "box"));
}

#[test]
fn sizes_are_mebibytes() {
    assert_eq!(mebibytes("256"), Ok(256));
    assert_eq!(mebibytes("256m"), Ok(256));
    assert_eq!(mebibytes("2GiB"), Ok(2048));
    assert_eq!(mebibytes("1T"), Ok(1024 * 1024));
    for wrong in [
        "",
        "0",
        "G",
        "-1",
        "1.5G",
        "12K",
        "99999999999999999T",
        "1ß",
    ] {
        assert!(mebibytes(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn a_disk_has_a_name_and_optionally_a_size_and_ro() {
    assert_eq!(disk_use("a:1G:ro").unwrap().size_mib, Some(1024));
    assert!(disk_use("a:1G:ro").unwrap().read_only);
    for wrong in ["", ":1G", "a:1G:2G", "a:ro:1G", "a:x"] {
        assert!(disk_use(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn new_limits_are_rates_or_none() {
    let line = "jiffy update --root-limit bps=1K,iops=7 --disk-limit data,none --disk-limit b,iops=1 \
                --network-limit pps=5,bps=2M,burst=64K,packet-burst=3 web";
    let given = match parse(line).verb {
        Verb::Update(Later(update)) => update,
        other => panic!("not an update: {other:?}"),
    };
    let number = NonZeroU64::new;
    let root = given.root_limit.unwrap();
    assert_eq!(
        (root.bytes_per_second, root.operations_per_second),
        (number(1024), number(7))
    );
    let [(data, none), (b, one)] = &given.disk_limit[..] else {
        panic!("{given:?}");
    };
    assert_eq!((data.as_str(), none.is_none()), ("data", true));
    assert_eq!((b.as_str(), one.operations_per_second), ("b", number(1)));
    let network = given.network_limit.unwrap();
    assert_eq!(
        (network.bytes_per_second, network.packets_per_second),
        (number(2 << 20), number(5))
    );
    assert_eq!(
        (network.bytes_burst, network.packets_burst),
        (number(64 << 10), number(3))
    );
    for (wrong, why) in [
        ("--root-limit pps=5 web", "'pps=5' is not a rate limit"),
        ("--network-limit iops=5 web", "'iops=5' is not a rate limit"),
        ("--network-limit pps=5,burst=1K web", "the burst of bps="),
        ("--network-limit packet-burst=9 web", "the burst of pps="),
        ("--disk-limit data web", "write NAME,bps=50M"),
        ("--disk-limit ,none web", "write NAME,bps=50M"),
        ("--root-limit bps=0 web", "'0' is not a rate"),
    ] {
        let error = refuse(&format!("jiffy update {wrong}"));
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn disks_have_options_and_limits() {
    let disk = disk_use("a:1G,mount=/srv/data,bps=50M,iops=1000").unwrap();
    assert_eq!((disk.name.as_str(), disk.size_mib), ("a", Some(1024)));
    assert_eq!(disk.mount.as_deref(), Some("/srv/data"));
    let rate = |limit: Option<std::num::NonZeroU64>| limit.map(u64::from);
    assert_eq!(rate(disk.limit.bytes_per_second), Some(50 << 20));
    assert_eq!(rate(disk.limit.operations_per_second), Some(1000));
    for wrong in [
        "a,",
        "a,ro",
        "a,bps=0",
        "a,bps=5x",
        "a,iops=-1",
        "a,speed=1",
    ] {
        assert!(disk_use(wrong).is_err(), "{wrong}");
    }
    assert_eq!(
        rate(disk_limit("iops=5").unwrap().operations_per_second),
        Some(5)
    );
    assert!(disk_limit("").is_err() && disk_limit("mount=/x").is_err());
}

#[test]
fn a_root_is_kept_on_a_disk_or_copied() {
    assert_eq!(run("jiffy run -- true").vm.root_disk, None);
    assert_eq!(
        run("jiffy run --root-disk -- true").vm.root_disk,
        Some(4096)
    );
    assert_eq!(
        run("jiffy run --root-disk=8G -- true").vm.root_disk,
        Some(8192)
    );
    assert!(run("jiffy run --root-copy --copy -- true").vm.copy);
    refuse("jiffy run --root-disk --root-copy -- true");
    refuse("jiffy run --copy -- true");
    refuse("jiffy disk serve base");
    refuse("jiffy disk serve a --vhost-user s --writable --read-only");
}

#[test]
fn a_copy_path_is_local_in_a_vm_or_a_tar_stream() {
    let vm = |vm: &str, path: &str| Place::Vm {
        vm: vm.into(),
        path: path.into(),
    };
    assert_eq!(place("box:/etc"), Ok(vm("box", "/etc")));
    assert_eq!(place("box:a:b"), Ok(vm("box", "a:b")));
    assert_eq!(place("./a:b"), Ok(Place::Here("./a:b".into())));
    assert_eq!(place("/a:b"), Ok(Place::Here("/a:b".into())));
    assert_eq!(place("-"), Ok(Place::Tar));
    assert!(place("box:").is_err());
    assert!(place("").is_err());
}

#[test]
fn signals_go_by_name_or_number() {
    assert_eq!(signal_number("TERM"), Ok(15));
    assert_eq!(signal_number("sigkill"), Ok(9));
    assert_eq!(signal_number("SYS"), Ok(31));
    assert_eq!(signal_number("64"), Ok(64));
    assert!(signal_number("0").is_err());
    assert!(signal_number("65").is_err());
    assert!(signal_number("SIG").is_err());
}

#[test]
fn a_run_from_a_snapshot_refuses_options_that_shape_the_vm() {
    let from = run("jiffy run --from base --name a --rm -e A=1 -- date");
    assert_eq!(from.from.as_deref(), Some("base"));
    assert_eq!(from.argv, ["date"]);
    for option in [
        "--cold",
        "--cpus 2",
        "--max-cpus 2",
        "--memory 1G",
        "--max-memory 1G",
        "--kernel full",
        "--image x",
        "--disk d",
        "--root-disk",
        "--root-copy",
        "--root-limit iops=1",
        "--console",
        "--init",
        "--kernel-arg quiet",
        "--huge-pages",
    ] {
        let refusal = refuse(&format!("jiffy run --from base {option} -- true"));
        assert!(refusal.contains("cannot be used with"), "{refusal}");
    }
    assert!(run("jiffy run --cold true").cold);
}

#[test]
fn options_of_the_snapshot_verbs_are_parsed() {
    use snapshot::Snapshot;
    let order = |line: &str| match parse(line).verb {
        Verb::Snapshot(Later(order)) => order,
        other => panic!("not a verb of snapshot: {other:?}"),
    };
    assert!(matches!(
        order("jiffy snapshot create --stop box one"),
        Snapshot::Create { stop: true, vm, name, .. } if vm == "box" && name == "one"
    ));
    assert!(matches!(
        order("jiffy snapshot ls -a"),
        Snapshot::Ls { all: true, .. }
    ));
    assert!(matches!(
        order("jiffy snapshot inspect one --png x.png"),
        Snapshot::Inspect {
            png: Some(_),
            map: false,
            ..
        }
    ));
    assert!(matches!(
        order("jiffy snapshot optimise one two"),
        Snapshot::Optimise { names } if names == ["one", "two"]
    ));
    assert!(refuse("jiffy snapshot inspect one --map --png x").contains("cannot be used with"));
    assert!(refuse("jiffy snapshot create box").contains("NAME"));
    assert!(refuse("jiffy snapshot rm").contains("NAME"));
}

#[test]
fn deferred_definitions_keep_the_description_of_a_verb() {
    let mut built = Cli::command();
    built.build();
    for verb in Cli::command().get_subcommands() {
        let name = verb.get_name();
        assert!(
            verb.get_arguments().next().is_none(),
            "the definitions of {name} are not deferred"
        );
        let built = built.find_subcommand(name).unwrap();
        assert_eq!(built.get_about(), verb.get_about(), "{name}");
        assert_eq!(built.get_long_about(), verb.get_long_about(), "{name}");
    }
}

#[test]
fn a_value_without_its_equals_sign_is_recognised() {
    let meant = |line: &str| run(line).vm.meant_as_value;
    for (line, joined) in [
        ("jiffy run --root-disk 8G debian date", "--root-disk=8G"),
        ("jiffy run -q --init /sbin/init debian", "--init=/sbin/init"),
        ("jiffy run --huge-pages 1G debian", "--huge-pages=1G"),
        ("jiffy run --timeline json -- date", "--timeline=json"),
    ] {
        assert_eq!(meant(line).as_deref(), Some(joined), "{line}");
    }
    for line in [
        "jiffy run --root-disk debian date",
        "jiffy run --init debian",
        "jiffy run --memory 256 8G",
        "jiffy run --root-disk -- 8G",
        "jiffy run --root-disk=8G 8G",
    ] {
        assert_eq!(meant(line), None, "{line}");
    }
    let mut built = Cli::command();
    built.build();
    let options = built.find_subcommand("run").unwrap().get_arguments();
    let with_equals = options.filter(|option| option.is_require_equals_set());
    let mut names: Vec<String> = with_equals
        .map(|option| format!("--{}", option.get_long().unwrap()))
        .collect();
    names.sort();
    assert_eq!(names, settle::WITH_EQUALS.map(|(name, _)| name));
}

#[test]
fn options_of_fork_are_parsed_and_its_count_limited() {
    let Verb::Fork(Later(fork)) = parse("jiffy fork box -n 3 --name child --timeline=json").verb
    else {
        panic!()
    };
    assert_eq!((fork.count, fork.name.as_deref()), (Some(3), Some("child")));
    assert_eq!(fork.show.timeline.unwrap().format, TimelineFormat::Json);
    assert!(refuse("jiffy fork box -n 0").contains("0"));
    assert!(refuse("jiffy fork box -n 1001").contains("1001"));
    for verb in ["pause", "resume", "hibernate", "wake"] {
        assert!(refuse(&format!("jiffy {verb}")).contains("VM"));
    }
}

#[test]
fn queue_options_are_parsed() {
    use queue::PriorityChoice::{High, Low, Normal};
    let plain = run("jiffy run true");
    assert_eq!(
        (plain.vm.priority, plain.time.wait, plain.quiet),
        (Normal, None, false)
    );
    let chosen = run("jiffy run --owner a --priority high --wait 2m -q true");
    assert_eq!(
        (chosen.vm.owner.as_deref(), chosen.vm.priority),
        (Some("a"), High)
    );
    assert_eq!((chosen.time.wait, chosen.quiet), (Some(120), true));
    assert_eq!(
        run("jiffy run --from one --priority low --wait 0")
            .time
            .wait,
        Some(0)
    );
    let query = |line: &str| match parse(line).verb {
        Verb::Start(Later(start)) => start.wait.query(),
        Verb::Wake(Later(wake)) => wake.wait.query(),
        Verb::Fork(Later(fork)) => fork.wait.query(),
        other => panic!("not a verb that waits: {other:?}"),
    };
    assert_eq!(query("jiffy start box"), "");
    assert_eq!(query("jiffy wake --wait 0 box"), "?wait_s=0");
    assert_eq!(
        query("jiffy fork --priority low --wait 1h box"),
        "?priority=low&wait_s=3600"
    );
    let Verb::Create(Later(create)) = parse("jiffy create --owner b --priority low").verb else {
        panic!()
    };
    assert_eq!(
        (create.vm.owner.as_deref(), create.vm.priority),
        (Some("b"), Low)
    );
    assert!(refuse("jiffy run --priority urgent true").contains("urgent"));
    assert!(refuse("jiffy wake --wait soon box").contains("not a time"));
}

#[test]
fn an_unknown_option_is_not_taken_as_a_command() {
    for line in ["jiffy run --memmory 1G true", "jiffy exec box --nosuch"] {
        assert!(Cli::try_parse_from(line.split(' ')).is_err(), "{line}");
    }
    let Verb::Run(Later(run)) = parse("jiffy run base ls -l --all").verb else {
        panic!()
    };
    assert_eq!(run.argv, ["ls", "-l", "--all"]);
    let Verb::Run(Later(run)) = parse("jiffy run -- -odd").verb else {
        panic!()
    };
    assert_eq!(run.argv, ["-odd"]);
}

#[test]
fn a_recording_is_replayed() {
    let pager = |line: &str| match parse(line).verb {
        Verb::Bench(Later(bench::Bench::Pager(pager))) => pager,
        other => panic!("not a verb of bench: {other:?}"),
    };
    let plain = pager("jiffy bench pager rec");
    assert_eq!(plain.recording.to_str(), Some("rec"));
    assert!(plain.image.is_none() && plain.repeat.is_none() && !plain.cold);
    let all = pager(
        "jiffy bench pager --image i --scratch s --repeat 5 --cold --only read/ --format json rec",
    );
    assert_eq!((all.repeat, all.cold), (Some(5), true));
    assert_eq!(all.format, bench::BenchFormat::Json);
    assert!(refuse("jiffy bench pager").contains("RECORDING"));
    assert!(refuse("jiffy bench pager rec --repeat 0").contains("0"));
    assert!(refuse("jiffy bench pager rec --nonsense").contains("nonsense"));
}

#[test]
fn a_command_for_ssh_keeps_its_own_options() {
    let ssh = |line: &str| match parse(line).verb {
        Verb::Ssh(Later(ssh)) => ssh,
        other => panic!("not ssh: {other:?}"),
    };
    let command = ssh("jiffy ssh -t -o A=b -L 1:c:2 me@web ls -l -t");
    assert_eq!((command.vm.as_str(), command.tty), ("me@web", true));
    assert_eq!(
        (command.option, command.forward),
        (vec!["A=b".into()], vec!["1:c:2".into()])
    );
    assert_eq!(command.argv, ["ls", "-l", "-t"]);
    assert!(ssh("jiffy ssh web").argv.is_empty());
    assert!(refuse("jiffy ssh").contains("VM"));
    assert!(refuse("jiffy ssh -t -T web").contains("cannot be used"));
}
