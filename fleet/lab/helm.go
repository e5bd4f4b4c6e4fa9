package main

import (
	"fmt"
	"os"

	"helm.sh/helm/v4/pkg/cmd"
	"helm.sh/helm/v4/pkg/kube"
)

// helm is Helm's own command line, under its own field manager.
func helm(arguments []string) int {
	kube.ManagedFieldsManager = "helm"
	command, err := cmd.NewRootCmd(os.Stdout, arguments, cmd.SetupLogging)
	if err != nil {
		return report(fmt.Errorf("cannot start helm: %w", err))
	}
	command.SetArgs(arguments)
	if err := command.Execute(); err != nil {
		return 1
	}
	return 0
}
