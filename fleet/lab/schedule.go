package main

import (
	"context"
	"flag"
	"io"

	"k8s.io/kubernetes/cmd/kube-scheduler/app"
)

// schedule runs kube-scheduler without its own endpoints and without an election: it is the only one.
func schedule(ctx context.Context, arguments []string) error {
	flags := flag.NewFlagSet("schedule", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	kubeconfig := flags.String("kubeconfig", "", "")
	if err := flags.Parse(arguments); err != nil || *kubeconfig == "" {
		return errUsage{"cannot schedule: --kubeconfig FILE is missing, or another option stands before it"}
	}
	command := app.NewSchedulerCommand()
	command.SilenceErrors, command.SilenceUsage = true, true
	command.SetArgs(append([]string{
		"--kubeconfig=" + *kubeconfig,
		"--leader-elect=false",
		"--secure-port=0",
	}, flags.Args()...))
	done := make(chan error, 1)
	go func() { done <- command.ExecuteContext(ctx) }()
	// SIGTERM ends the command as well; the end of the parent does not.
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return nil
	}
}
