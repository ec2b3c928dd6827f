{{- define "optstate.selector" -}}
app.kubernetes.io/name: optstate
{{- end }}

{{- define "optstate.labels" -}}
{{ include "optstate.selector" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* The configuration with the pod's own places in it. */}}
{{- define "optstate.config" -}}
{{- $config := deepCopy .Values.config }}
{{- $_ := set $config "state_dir" "/var/lib/optstate/state" }}
{{- $_ := set $config "socket" "/run/optstate/optstated.sock" }}
{{- if .Values.nvmePaths }}
{{- $directories := list }}
{{- range $index, $path := .Values.nvmePaths }}
{{- $directories = append $directories (printf "/var/lib/optstate/nvme/%d" $index) }}
{{- end }}
{{- $nvme := deepCopy (default dict $config.nvme) }}
{{- $_ := set $nvme "directories" $directories }}
{{- $_ := set $config "nvme" $nvme }}
{{- end }}
{{- if .Values.tcp.enabled }}
{{- $_ := set $config "listen" (list (printf "0.0.0.0:%d" (int .Values.tcp.port))) }}
{{- $tls := dict "certificate_file" "/etc/optstate-tls/tls.crt" "key_file" "/etc/optstate-tls/tls.key" }}
{{- $access := deepCopy (default dict $config.access) }}
{{- if .Values.tcp.tokensSecretName }}
{{- $_ := set $access "tokens_file" "/etc/optstate-access/tokens.yaml" }}
{{- else }}
{{- $_ := set $tls "client_ca_file" "/etc/optstate-tls/ca.crt" }}
{{- $_ := set $access "identities_file" "/etc/optstate-access/identities.yaml" }}
{{- end }}
{{- $_ := set $config "tls" $tls }}
{{- $_ := set $config "access" $access }}
{{- end }}
{{- toYaml $config }}
{{- end }}

{{/* Each probe asks optctl, over the socket. */}}
{{- define "optstate.probe" -}}
exec:
  command: [/usr/bin/optctl, --endpoint, "unix:/run/optstate/optstated.sock", --timeout, "4", status]
timeoutSeconds: 5
{{- end }}
